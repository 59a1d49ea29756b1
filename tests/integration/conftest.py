"""Servers for the tests: real processes on free ports, and proof that nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest

START_S = 120.0
ROOT = Path(__file__).parents[2]


class Server:
    """One `servekit-serve`, its output in a file. Its run directory lies in a folder of its own.

    Args:
        prefix: words of a command that runs it.
        entry: what its ranks run instead of the scheduler, a function of `entries.py`.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        env: dict[str, str] | None = None,
        wait: bool = True,
        prefix: Sequence[str] = (),
        entry: str | None = None,
    ) -> None:
        self.folder = folder
        self.output, self.log = folder / "stdout", folder / "stderr"
        self.runtime = Path(f"/tmp/sk-test-{os.getpid()}-{folder.name[-24:]}")
        self.runtime.mkdir(mode=0o700)
        settings = {k: v for k, v in os.environ.items() if not k.startswith("SERVEKIT_")}
        settings["XDG_RUNTIME_DIR"] = str(self.runtime)
        program = ["-P", "-m", "servekit.cli.serve"]
        if entry is not None:
            program = ["-m", "tests.integration.entries", entry]
            settings["PYTHONPATH"] = os.pathsep.join(sys.path)
        self.began = time.monotonic()
        with self.output.open("wb") as out, self.log.open("wb") as err:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *program, "--port", "0", *arguments],
                stdout=out,
                stderr=err,
                cwd=ROOT if entry is not None else None,
                env={**settings, **(env or {})},
                start_new_session=True,
            )
        self.family: dict[int, psutil.Process] = {}
        self.host, self.port = "127.0.0.1", 0
        if wait:
            try:
                self.wait()
            except AssertionError:
                self.close()
                raise

    def wait(self) -> None:
        """Wait until it serves."""
        until(lambda: self.process.poll() is not None or "\n" in self.output.read_text(), START_S, self.text)
        assert self.process.poll() is None, self.text()
        self.host, _, port = self.output.read_text().split("http://")[1].split("/")[0].rpartition(":")
        self.port = int(port)
        self.processes()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        """What it logged."""
        return self.log.read_text(errors="replace")

    def processes(self) -> dict[str, psutil.Process]:
        """Living processes by title."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]:
                self.family[each.pid] = each
        found = {}
        for each in self.family.values():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                    found[" ".join(each.cmdline()).strip()] = each
        return found

    def gone(self) -> bool:
        """Neither main nor any child that was ever seen runs."""
        return self.process.poll() is not None and not self.processes()

    def traces(self) -> list[str]:
        """What is left of it: shared memory, run directory, port."""
        left = [str(path) for path in Path("/dev/shm").glob(f"servekit-{self.pid}-*")]
        left += [str(path) for path in self.runtime.iterdir()]
        if self.port:
            with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as sock:
                if sock.connect_ex((self.host.strip("[]"), self.port)) == 0:
                    left.append(f"port {self.port}")
        return left

    def stop(self, number: int = signal.SIGTERM, timeout: float = 40.0) -> int:
        """Signal main and wait; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def complete(
        self, prompt: str = "The capital of France is", timeout: float = 30.0, **fields: object
    ) -> httpx.Response:
        body = {"model": "x", "prompt": prompt, "max_tokens": 8, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout)

    def state(self) -> dict:
        """`/debug/state`."""
        answer = httpx.get(f"{self.url}/debug/state", timeout=10)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def close(self) -> None:
        """End it in order, so that it cleans up; what still runs after that is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        for each in self.processes().values():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait(20)
        until(self.gone, 10)
        shutil.rmtree(self.runtime, ignore_errors=True)


def until(condition: Callable[[], object], seconds: float, why: Callable[[], str] = str) -> float:
    """Wait for a condition; seconds it took. Fails with `why()` when the time has passed."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {why()}"
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers with the mock engine; they end with the test."""
    running: list[Server] = []

    def start(*arguments: str, engine: str = "mock", **options: object) -> Server:
        folder = tmp_path_factory.mktemp("server")
        running.append(Server(folder, "--engine", engine, "--served-model-name", "x", *arguments, **options))
        return running[-1]

    yield start
    for server in running:
        server.close()


class Stream:
    """A streamed completion that is read in a thread of its own.

    Attributes:
        events: the data of each event, as text.
        cut: the connection ended in the middle.
    """

    def __init__(self, server: Server, max_tokens: int = 8000, **fields: object) -> None:
        import threading

        self.events: list[str] = []
        self.cut = False
        self.status = 0
        self._body = {"model": "x", "prompt": "Count:", "max_tokens": max_tokens, "stream": True, **fields}
        self._url = f"{server.url}/v1/completions"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line[6:])
        except httpx.HTTPError:
            self.cut = True

    def running(self) -> bool:
        return bool(self.events) and self._thread.is_alive()

    def join(self, seconds: float) -> bool:
        """Wait for its end; whether it came."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def errors(self) -> int:
        """Error events."""
        return sum('"error"' in event for event in self.events)

    @property
    def text(self) -> str:
        """What it has got so far."""
        events = [json.loads(event) for event in self.events if event != "[DONE]"]
        return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))

    def ended_with_one_error(self) -> bool:
        """It ended as a stream does whose server goes away: one error event, then [DONE], nothing after."""
        return not self.cut and self.errors == 1 and '"error"' in self.events[-2] and self.events[-1] == "[DONE]"


@pytest.fixture
def beside() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any server, and has to live on."""
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield other
    assert other.poll() is None
    other.kill()
    other.wait()
    assert other.stdin is not None
    other.stdin.close()


@pytest.fixture
def stream() -> type[Stream]:
    return Stream


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., float]:
    return until


NODES_SECRET = "an example of a secret, long enough"


class Nodes:
    """One server on several nodes; the first one that is started gets the port that the others know."""

    def __init__(self, start: Callable[..., Server], folder: Path, nodes: int) -> None:
        self._start, self.nodes = start, nodes
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{sock.getsockname()[1]}"
        self.secret = folder / "secret"
        self.secret.write_text(NODES_SECRET)
        self.secret.chmod(0o600)

    def node(self, number: int, *flags: str, replicas: bool = True, **options: object) -> Server:
        """Start one node, by default of one replica a node."""
        layout = ["--data-parallel-size", str(self.nodes)] if replicas else []
        layout += ["--nnodes", str(self.nodes), "--node-rank", str(number)]
        place = ["--dist-init-addr", self.address, "--cluster-secret-file", str(self.secret)]
        return self._start(*layout, *place, *flags, wait=False, **options)

    def both(self, *flags: str, **options: object) -> tuple[Server, Server]:
        """Node 0 and node 1, serving."""
        head, other = self.node(0, *flags, **options), self.node(1, *flags, **options)
        head.wait()
        other.processes()
        return head, other

    def left(self, *nodes: Server) -> None:
        """Nothing is left of these nodes."""
        for each in nodes:
            until(each.gone, 5.0, each.text)
            assert each.traces() == []


@pytest.fixture
def nodes(start: Callable[..., Server], tmp_path: Path) -> Callable[..., Nodes]:
    return lambda count=2: Nodes(start, tmp_path, count)
