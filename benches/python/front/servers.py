"""The servers that are compared, each with an engine that answers every running request with one token a step."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from programs import free_port, running, wait_ready

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


@contextlib.contextmanager
def servekit(step_ms: float, workers: int, flags: list[str]) -> Iterator[Server]:
    """servekit with its mock engine."""
    port = free_port()
    command = [sys.executable, "-m", "servekit.cli.serve", "--engine", "mock", "--mock-step-ms", f"{step_ms:g}"]
    command += ["--port", str(port), "--tokenizer-workers", str(workers), *flags]
    with tempfile.TemporaryDirectory() as folder, running(command, Path(folder) / "log") as process:
        wait_ready(process, port, "/ready", Path(folder) / "log", START_S)
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
            wait_ready(process, port, "/health", log, START_S)
            peer = psutil.Process(process.pid)
            yield Server("vllm-rs", port, str(model), [peer], [peer])
