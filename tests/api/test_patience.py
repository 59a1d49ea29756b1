"""Clients that are too slow, too silent or too many lose their connections, and nobody else does."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from servekit.http import patience
from servekit.http import server as server_module

from tests.api.fakes import FakeServer, says, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 3}).encode()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become tenths."""
    for name, seconds in (("FIRST_BYTE_S", 0.6), ("HEAD_S", 0.3), ("BODY_S", 0.3), ("READ_S", 0.5), ("LINGER_S", 0.3)):
        monkeypatch.setattr(patience, name, seconds)
    monkeypatch.setattr(server_module, "SWEEP_S", 0.05)


@pytest.fixture
def slow(own_server: Callable[..., FakeServer]) -> FakeServer:
    return own_server()


@pytest.fixture
def client(slow: FakeServer) -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.settimeout(10)
        sock.connect(slow.address)
        yield sock


def rest(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    got = b""
    try:
        while part := sock.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    return got


def is_408(raw: bytes) -> bool:
    head, _, body = raw.partition(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.1 408 ") and json.loads(body)["error"]["code"] == "request_timeout"


def test_who_says_nothing_is_let_go(slow: FakeServer, client: socket.socket) -> None:
    assert rest(client) == b""
    assert slow.page.counters["slow_senders"] == 1


def test_a_head_that_does_not_end(slow: FakeServer, client: socket.socket) -> None:
    client.sendall(HEAD)
    assert is_408(rest(client))
    assert slow.page.counters["slow_senders"] == 1


def test_a_head_that_drips(slow: FakeServer, client: socket.socket) -> None:
    client.setblocking(False)
    began = time.monotonic()
    client.send(HEAD)
    while "slow_senders" not in slow.page.counters and time.monotonic() - began < 5:
        try:
            client.send(b"a: b\r\n")
        except OSError:
            break
        time.sleep(0.02)
    assert until(lambda: slow.page.counters.get("slow_senders") == 1)


def test_a_body_that_stalls(slow: FakeServer, client: socket.socket) -> None:
    client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY[:-1])
    assert is_408(rest(client))
    assert until(lambda: not slow.worker._server.server_state.tasks), "the handler is done as well"


def test_who_is_slow_behind_a_stream_gets_the_stream_first(slow: FakeServer, client: socket.socket) -> None:
    slow.control.script = says("a", "b", "c", pause=0.5)
    body = BODY[:-1] + b', "stream": true}'
    client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body + HEAD)
    stream, _, refusal = rest(client).partition(b"0\r\n\r\n")
    assert stream.startswith(b"HTTP/1.1 200") and stream.endswith(b"data: [DONE]\n\n\r\n")
    assert is_408(refusal)
    assert slow.page.counters["slow_senders"] == 1


def test_a_body_that_comes_steadily_may_take_long(slow: FakeServer, client: socket.socket) -> None:
    padded = b'{"user": "' + b"x" * 3000 + b'", ' + BODY[1:]
    client.sendall(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(padded))
    for at in range(0, len(padded), 300):
        client.sendall(padded[at : at + 300])
        time.sleep(0.1)
    assert b"Hello world!" in rest(client)
    assert "slow_senders" not in slow.page.counters


def test_an_answer_may_take_long_and_an_idle_connection_stays(slow: FakeServer, client: socket.socket) -> None:
    slow.control.script = says("a", "b", "c", pause=0.4)
    for _ in range(2):
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        got = b""
        while b'"usage"' not in got:
            got += client.recv(65536)
        time.sleep(0.8)
    assert "slow_senders" not in slow.page.counters


def test_who_does_not_read_the_answer_is_cut(slow: FakeServer) -> None:
    long = "x" * 60_000
    slow.control.script = says(*[long] * 60)
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 60, "stream": False}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(10)
        sock.connect(slow.address)
        sock.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert until(lambda: slow.page.counters.get("slow_readers") == 1, 10)
        assert until(lambda: not slow.worker._server.server_state.connections)
        # What the kernel had taken may still come; the end is missing.
        assert not rest(sock).endswith(b"}")


def test_there_is_a_bound_on_connections(
    own_server: Callable[..., FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "connection_limit", lambda: 4)
    server = own_server()
    taken = [socket.create_connection(server.address) for _ in range(3)]
    try:
        assert until(lambda: len(server.worker._server.server_state.connections) == 3)
        with socket.create_connection(server.address, 5) as refused:
            raw = rest(refused)
        assert raw.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in raw
        assert until(lambda: server.page.counters.get("crowded") == 1)
    finally:
        for sock in taken:
            sock.close()
    assert until(lambda: not server.worker._server.server_state.connections)
    assert httpx.get(server.url + "/health").status_code == 200


def test_nobody_pays_for_time_that_the_server_lost(slow: FakeServer, client: socket.socket) -> None:
    class Loop:
        now = 100.0

        def time(self) -> float:
            return self.now

    client.sendall(HEAD)
    connections = slow.worker._server.server_state.connections
    assert until(lambda: connections)
    (connection,) = connections
    connection.due = 105.0
    loop = Loop()
    sweep = patience.Sweep(loop, lambda what, n: pytest.fail(what))  # type: ignore[arg-type]
    loop.now = 130.0
    sweep([connection])
    assert connection.due == pytest.approx(105 + 29)
