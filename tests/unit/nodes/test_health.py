"""The small endpoint of nodes other than 0: what it answers, and to whom not."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest
from servekit.config import ConfigError
from servekit.runtime.nodes.health import MOST, HealthEndpoint, State


@pytest.fixture
def told() -> State:
    return State(True, True, {"node": 1})


@pytest.fixture
def endpoint(told: State) -> Iterator[HealthEndpoint]:
    endpoint = HealthEndpoint("127.0.0.1", 0, lambda: told)
    yield endpoint
    endpoint.close()


def ask(endpoint: HealthEndpoint, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{endpoint.port}{path}", timeout=5)


def test_it_tells_whether_the_node_lives_and_serves_and_nothing_else(endpoint, told):
    for alive, ready in ((True, True), (True, False), (False, False)):
        told.alive, told.ready = alive, ready
        assert ask(endpoint, "/health").status_code == (200 if alive else 503)
        answer = ask(endpoint, "/ready?x=1")
        assert answer.status_code == (200 if ready else 503)
        assert answer.json() == {"node": 1}
        head = httpx.head(f"http://127.0.0.1:{endpoint.port}/ready", timeout=5)
        assert (head.status_code, head.content) == (answer.status_code, b"")
    assert ask(endpoint, "/v1/models").status_code == 404


def test_garbage_and_idle_connections_do_not_keep_a_probe_out(endpoint, told):
    idle = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(MOST // 2)]
    for garbage in (b"\x16\x03\x01\x00\xff" * 50, b"GET\r\n\r\n", b"\xff" * 70000, b"POST /health HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", endpoint.port)) as sock:
            sock.settimeout(5)
            # It may hang up at once.
            with contextlib.suppress(OSError):
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    assert ask(endpoint, "/health").status_code == 200
    for each in idle:
        each.close()


def test_a_port_that_is_taken_is_told(endpoint, told):
    with pytest.raises(ConfigError, match=f"--health-port {endpoint.port}: can't listen on 127.0.0.1: Address already"):
        HealthEndpoint("127.0.0.1", endpoint.port, lambda: told)
