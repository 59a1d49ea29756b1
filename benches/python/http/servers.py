"""The servers that are compared, each with an engine that answers every running request with one token a step."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HERE = Path(__file__).parent
START_S = 120


@dataclass
class Server:
    """One that is ready.

    Attributes:
        counted: processes whose CPU time counts, the engine is none of them.
        workers: those of them that hold the clients' connections.
    """

    name: str
    port: int
    model: str
    counted: list[psutil.Process]
    workers: list[psutil.Process] = field(default_factory=list)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_ready(port: int, path: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, OSError):
            if urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2).status == 200:
                return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise SystemExit(f"{process.args} did not get ready:\n{log.read_text(errors='replace')[-2000:]}")


@contextlib.contextmanager
def running(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **env})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def servekit(step_ms: float, workers: int, flags: list[str]) -> Iterator[Server]:
    """servekit with its mock engine."""
    port = free_port()
    command = [sys.executable, "-m", "servekit.cli.serve", "--engine", "mock", "--mock-step-ms", f"{step_ms:g}"]
    command += ["--port", str(port), "--tokenizer-workers", str(workers), *flags]
    with tempfile.TemporaryDirectory() as folder, running(command, Path(folder) / "log") as process:
        wait_ready(port, "/ready", process, Path(folder) / "log")
        models = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10))
        main = psutil.Process(process.pid)
        every = {each: " ".join(each.cmdline()) for each in (main, *main.children(recursive=True))}
        yield Server(
            f"servekit, {workers} worker{'s' * (workers > 1)}",
            port,
            models["data"][0]["id"],
            [each for each, title in every.items() if "scheduler" not in title],
            [each for each, title in every.items() if "http" in title],
        )


def find_vllm_rs() -> tuple[Path, Path] | None:
    """The peer's binary and its model folder: VLLM_RS and VLLM_RS_MODEL, or `vllm-rs` and `model_dir` in ./peer."""
    binary = Path(os.environ.get("VLLM_RS") or shutil.which("vllm-rs") or "peer/vllm-rs").absolute()
    model = Path(os.environ.get("VLLM_RS_MODEL") or binary.parent / "model_dir").absolute()
    return (binary, model) if os.access(binary, os.X_OK) and (model / "tokenizer.json").exists() else None


@contextlib.contextmanager
def vllm_rs(step_ms: float, binary: Path, model: Path) -> Iterator[Server]:
    """The Rust front end of vLLM. It and its engine end together: neither survives the other's restart."""
    port, handshake = free_port(), free_port()
    command = [str(binary), "serve", str(model), "--data-parallel-size-local", "0", "--data-parallel-size", "1"]
    command += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(handshake), "--port", str(port)]
    engine = [sys.executable, str(HERE / "vllm_engine.py"), f"tcp://127.0.0.1:{handshake}"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with running(command, log) as process, running(engine, Path(folder) / "engine", STEP_MS=f"{step_ms:g}"):
            wait_ready(port, "/health", process, log)
            peer = psutil.Process(process.pid)
            yield Server("vllm-rs", port, str(model), [peer], [peer])
