"""Telling whoever started a server that it serves, by systemd's protocol (sd_notify(3)), and hearing it."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path

NOTIFY_SOCKET = "NOTIFY_SOCKET"
_READY, _STOPPING = b"READY=1", b"STOPPING=1"


def tell_ready() -> None:
    """Tell that the server serves, if somebody wants to hear it."""
    _tell(_READY)


def tell_stopping() -> None:
    """Tell that the server takes no more requests."""
    _tell(_STOPPING)


def _tell(what: bytes) -> None:
    address = os.environ.get(NOTIFY_SOCKET, "")
    if address[:1] not in ("/", "@"):
        return
    # A name that begins with a zero byte is in no folder (unix(7)); the environment can't hold one.
    name = "\0" + address[1:] if address[0] == "@" else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.sendto(what, name)


class Notifications:
    """Hears what a child tells.

    Attributes:
        environment: what the child has to be given.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="servekit-notify-")
        path = Path(self._folder.name) / "socket"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        self._ready = False
        self.environment = {NOTIFY_SOCKET: str(path)}

    def is_ready(self) -> bool:
        """Whether it has said that it serves."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._ready |= _READY in self._socket.recv(4096).splitlines()
        return self._ready

    def close(self) -> None:
        """Hear nothing more."""
        self._socket.close()
        self._folder.cleanup()
