"""Servers as programs: a port, a start, an end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def answers(port: int, path: str) -> bool:
    """Whether a GET of the path is answered with 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_ready(process: subprocess.Popen[bytes], port: int, path: str, log: Path, seconds: float) -> None:
    """Wait for the first good answer under a path; ends this program if none comes in time."""
    deadline = time.monotonic() + seconds
    while not answers(port, path):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{process.args} did not get ready:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


@contextlib.contextmanager
def running(command: list[str], log: Path, end_s: float = 10, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program, its output in a file; asked to end and killed after `end_s` seconds."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **env})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(end_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU time of processes so far, user and system."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)
