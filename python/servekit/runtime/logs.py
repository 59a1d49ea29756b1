"""One log format for every process of the server, and for the libraries inside them."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

import msgspec

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_QUIET = ("httpx", "httpcore", "asyncio", "filelock", "urllib3", "multipart")
"""Libraries whose debug lines are of no use to an operator."""


class _Formatter(logging.Formatter):
    """Common part: which process speaks."""

    def __init__(self, title: str, epoch: int) -> None:
        super().__init__()
        self.title, self.epoch, self.pid = title, epoch, os.getpid()

    def time_of(self, record: logging.LogRecord) -> str:
        """Local time with milliseconds."""
        seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}"

    def message_of(self, record: logging.LogRecord) -> str:
        """Message, then the traceback if there is one."""
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if record.stack_info:
            text += "\n" + record.stack_info
        return text


class TextFormatter(_Formatter):
    """`time level title epoch pid message`."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as text."""
        who = f"{self.title} epoch={self.epoch} pid={self.pid}"
        return f"{self.time_of(record)} {record.levelname:<7} {who} {self.message_of(record)}"


class JsonFormatter(_Formatter):
    """One JSON object a line with the same fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One record as JSON."""
        fields: dict[str, Any] = {
            "time": self.time_of(record),
            "level": record.levelname.lower(),
            "title": self.title,
            "epoch": self.epoch,
            "pid": self.pid,
            "logger": record.name,
            "message": self.message_of(record),
        }
        return msgspec.json.encode(fields).decode()


def configure(title: str, epoch: int, level: str, log_format: str) -> None:
    """Send every logger of this process, uvicorn's included, to standard error in servekit's format.

    Args:
        title: the process title, such as `servekit::http[0]`.
        epoch: which life of that process this is, from 1.
        level: debug, info, warning or error.
        log_format: text or json.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonFormatter if log_format == "json" else TextFormatter)(title, epoch))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    set_level(level)
    logging.captureWarnings(True)
    # A log that nobody reads any more must not end the process that writes it.
    logging.raiseExceptions = False


def set_level(level: str) -> None:
    """Log what is at least that important, from now on.

    Args:
        level: debug, info, warning or error.

    Raises:
        ValueError: there is no such level.
    """
    if level not in LEVELS:
        raise ValueError(f"{level!r} is no log level, it must be one of {', '.join(LEVELS)}")
    logging.getLogger().setLevel(LEVELS[level])
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, LEVELS[level]))
