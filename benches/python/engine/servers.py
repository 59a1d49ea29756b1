"""Starts the servers that are measured, one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from jobs import Target

HERE = Path(__file__).parent
START_S = 300


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def cores() -> int:
    """What this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def _running(command: list[str], port: int, path: str, log: Path) -> Iterator[None]:
    """A program, from its first good answer under a path on."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2).status == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command} did not get ready:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def servekit(model: Path, folder: Path, flags: list[str]) -> Iterator[Target]:
    """The whole of servekit with its torch engine."""
    port = free_port()
    command = [sys.executable, "-m", "servekit.cli.serve", str(model), "--port", str(port), *flags]
    with _running(command, port, "/ready", folder / "servekit.log"):
        models = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10))
        yield Target(port, models["data"][0]["id"])


@contextlib.contextmanager
def llama(python: Path, model: Path, folder: Path) -> Iterator[Target]:
    """llama.cpp's server, from the peers' environment."""
    port = free_port()
    command = [str(python), str(HERE / "peer_llama.py"), "serve", str(model), str(port), str(cores())]
    with _running(command, port, "/health", folder / f"{model.stem}.log"):
        yield Target(port, "peer")
