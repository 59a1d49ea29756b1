"""Starts the servers that are measured, one at a time."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from engine.jobs import Target
from programs import free_port, running, wait_ready
from provenance import cores

HERE = Path(__file__).parent
START_S = 300
END_S = 30


@contextlib.contextmanager
def servekit(model: Path, folder: Path, flags: list[str]) -> Iterator[Target]:
    """The whole of servekit with its torch engine."""
    port = free_port()
    command = [sys.executable, "-m", "servekit.cli.serve", str(model), "--port", str(port), *flags]
    log = folder / "servekit.log"
    with running(command, log, END_S) as process:
        wait_ready(process, port, "/ready", log, START_S)
        models = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10))
        yield Target(port, models["data"][0]["id"])


@contextlib.contextmanager
def llama(python: Path, model: Path, folder: Path) -> Iterator[Target]:
    """llama.cpp's server, from the peers' environment."""
    port = free_port()
    command = [str(python), str(HERE / "peer_llama.py"), "serve", str(model), str(port), str(cores())]
    log = folder / f"{model.stem}.log"
    with running(command, log, END_S) as process:
        wait_ready(process, port, "/health", log, START_S)
        yield Target(port, "peer")
