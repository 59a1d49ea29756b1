"""A server whose second node Ray places, on a Ray cluster of two nodes on this machine."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.conftest import Server, Stream, until
from tests.integration.test_reference import LINES, check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

# A process of its own: Ray keeps threads, and ends with the process that started it.
CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
other = cluster.add_node(num_cpus=2)
print(json.dumps({"address": cluster.address}), flush=True)
for line in sys.stdin:
    cluster.remove_node(other, allow_graceful=False)
    print("removed", flush=True)
cluster.shutdown()
"""


class Ray:
    """Two nodes with two cores each."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = json.loads(self._line())["address"]

    def _line(self) -> str:
        assert self.process.stdout is not None
        return next(line for line in self.process.stdout if line.startswith(("{", "removed")))

    def remove(self) -> None:
        """Take the second one away, without a word."""
        assert self.process.stdin is not None
        print("remove", file=self.process.stdin, flush=True)
        self._line()

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture
def ray() -> Iterator[Ray]:
    ray = Ray()
    yield ray
    ray.close()


@pytest.fixture
def nodes(tmp_path: Path, ray: Ray) -> list[str]:
    """Flags of a server with its second node on Ray's second one."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of the tests, long enough\n")
    secret.chmod(0o600)
    port = free_port()
    where = ["--launcher", "ray", "--ray-address", ray.address, "--nnodes", "2"]
    return [*where, "--dist-init-addr", f"127.0.0.1:{port}", "--cluster-secret-file", str(secret)]


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("layout", ["--dp 2", "--pp 2"])
def test_layouts_give_the_tokens_of_one_process(start: Callable[..., Server], nodes: list[str], layout: str) -> None:
    server = start("--dtype", "float32", *nodes, *layout.split(), engine="torch")
    check(server, LINES)
    assert server.stop() == 0
    until(server.gone, 20)


def test_a_node_that_ray_loses_is_a_node_that_died(start: Callable[..., Server], nodes: list[str], ray: Ray) -> None:
    server = start(*nodes, "--dp", "2", "--mock-step-ms", "20")
    streams = [Stream(server) for _ in range(8)]
    until(lambda: all(len(stream.events) > 3 for stream in streams), 20)
    ray.remove()
    until(lambda: any(stream.errors for stream in streams), 15, server.text)
    # Half of them were there; the others go on, and so do new ones.
    assert server.complete().status_code == 200
    assert httpx.get(f"{server.url}/ready", timeout=10).status_code == 200
    dead = [stream for stream in streams if stream.errors]
    assert 0 < len(dead) < 8
    until(lambda: all(stream.ended_with_one_error() for stream in dead), 10)


def test_no_end_of_the_launcher_leaves_anything(start: Callable[..., Server], nodes: list[str]) -> None:
    server = start(*nodes, "--dp", "2")
    node_1 = psutil.Process(int(re.findall(r"pid=(\d+) asking node 0", server.text())[0]))
    assert server.stop(signal.SIGINT) == 130
    until(lambda: not node_1.is_running() and server.gone(), 20, server.text)
    server = start(*nodes, "--dp", "2")
    node_1 = psutil.Process(int(re.findall(r"pid=(\d+) asking node 0", server.text())[0]))
    server.process.kill()
    until(lambda: not node_1.is_running() and server.gone(), 30, server.text)


def test_a_cluster_that_is_not_there_is_named_in_one_line(start: Callable[..., Server], nodes: list[str]) -> None:
    nodes[3] = f"127.0.0.1:{free_port()}"
    server = start(*nodes, "--dp", "2", wait=False)
    assert server.process.wait(30) == 1
    lines = server.text().splitlines()
    assert len(lines) == 1 and f"no Ray cluster at {nodes[3]}" in lines[0]


def test_a_cluster_that_is_too_small_says_what_it_has(start: Callable[..., Server], nodes: list[str]) -> None:
    server = start(*nodes, "--dp", "6", wait=False)
    assert server.process.wait(60) == 1
    assert "no room for 2 nodes of 3 CPUs each, one of them on this machine: its machines have 2, 2" in server.text()


def test_ports_that_are_taken_end_the_start(start: Callable[..., Server], nodes: list[str]) -> None:
    server = start(*nodes, "--dp", "2", "--dist-port-range", "1-1", wait=False)
    assert server.process.wait(60) == 1
    assert "none of these ports is free" in server.text()
