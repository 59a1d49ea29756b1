"""What `StreamingProtocol` relies on in uvicorn, seen from the socket.

It runs with the uvicorn that is installed. With the lowest one that `pyproject.toml` allows:

    pip install --no-deps --target /tmp/uvicorn-lowest uvicorn==0.38.0
    PYTHONPATH=/tmp/uvicorn-lowest python -m pytest tests/contract/test_protocol.py
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
import uvloop
from servekit.http.protocol import EXTENSION, ResponseStream, StreamingProtocol

from tests.api.fakes import until

PIECES = [b"one", b"two", b"three"]


class App:
    """An ASGI application that streams through the extension, as far as its test lets it.

    Attributes:
        go_on: set by a test to let a held response end; `/hold` and `/flood` wait for it.
        streams: of the requests so far.
        lost, paused: how often the extension said so.
    """

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.streams: list[ResponseStream] = []
        self.lost = 0
        self.paused = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            more = (await receive()).get("more_body", False)
        stream: ResponseStream = scope["extensions"][EXTENSION]
        if scope["path"] == "/late":
            await self._until(lambda: stream.gone)
        stream.watch(self._on_lost)
        stream.open(self._on_pause)
        self.streams.append(stream)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in PIECES:
            stream.write(piece + scope["path"].encode())
        if scope["path"] == "/flood":
            while not stream.paused:
                stream.write(b"x" * 50_000)
                await asyncio.sleep(0)
            await stream.drain()
        if scope["path"] in ("/hold", "/flood"):
            await self._until(self.go_on.is_set)
        await stream.finish(send, b"end")

    def _on_lost(self) -> None:
        self.lost += 1
        self.go_on.set()

    def _on_pause(self) -> None:
        self.paused += 1

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)


class Served:
    """A uvicorn server on a thread."""

    def __init__(self, app: App, **config: Any) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        options = {"http": StreamingProtocol, "loop": "none", "lifespan": "off", "log_config": None, **config}
        self.server = uvicorn.Server(uvicorn.Config(app, **options))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert until(lambda: self.server.started)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.server.serve(sockets=[self.listener]))

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=10)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(15)


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def serve(app: App) -> Iterator[Callable[..., Served]]:
    started = []

    def start(**config: Any) -> Served:
        started.append(Served(app, **config))
        return started[-1]

    yield start
    app.go_on.set()
    for each in started:
        each.close()


def request(path: str, method: str = "POST", version: str = "1.1", head: str = "") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nhost: x\r\ncontent-length: 2\r\n{head}\r\nhi".encode()


def answer(path: str) -> bytes:
    """The body of a response, in its chunks."""
    parts = [piece + path.encode() for piece in PIECES] + [b"end"]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def read_until(sock: socket.socket, wanted: bytes) -> bytes:
    got = b""
    while wanted not in got:
        part = sock.recv(65536)
        assert part, got
        got += part
    return got


def rest(sock: socket.socket) -> bytes:
    got = b""
    while part := sock.recv(1 << 20):
        got += part
    return got


def test_chunks_and_the_next_request_on_the_same_connection(serve, app: App) -> None:
    with serve().connect() as sock:
        for path in ("/a", "/b"):
            sock.sendall(request(path))
            head, _, body = read_until(sock, b"0\r\n\r\n").partition(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            assert body == answer(path)
    assert app.lost == app.paused == 0


def test_http_1_0_gets_a_body_without_chunks_that_ends_with_the_connection(serve) -> None:
    with serve().connect() as sock:
        sock.sendall(request("/a", version="1.0", head="connection: keep-alive\r\n"))
        head, _, body = rest(sock).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"one/atwo/athree/aend"


def test_head_has_no_body(serve) -> None:
    with serve().connect() as sock:
        sock.sendall(request("/a", method="HEAD") + request("/b"))
        got = read_until(sock, b"0\r\n\r\n")
    assert got.split(b"\r\n\r\n", 1)[1].startswith(b"HTTP/1.1 200")
    assert got.endswith(answer("/b"))


def test_pipelined_requests_are_answered_in_order(serve, app: App) -> None:
    with serve().connect() as sock:
        sock.sendall(request("/hold") + request("/b") + request("/c"))
        first = read_until(sock, b"three/hold")
        assert b"/b" not in first
        app.go_on.set()
        got = first + read_until(sock, answer("/c"))
    assert [got.count(answer(path)) for path in ("/hold", "/b", "/c")] == [1, 1, 1]
    assert got.index(answer("/hold")) < got.index(answer("/b")) < got.index(answer("/c"))


@pytest.mark.parametrize("pipelined", [b"", request("/b")])
def test_a_client_that_leaves_is_told_of_once(serve, app: App, pipelined: bytes) -> None:
    with serve().connect() as sock:
        sock.sendall(request("/hold") + pipelined)
        read_until(sock, b"three/hold")
    assert until(lambda: app.lost)
    app.streams[0].write(b"nobody reads this")
    assert until(lambda: not app.streams[0].buffered)
    assert app.lost == 1


def test_a_client_that_left_before_anybody_watched(serve, app: App) -> None:
    with serve().connect() as sock:
        sock.sendall(request("/late"))
    assert until(lambda: app.lost == 1)


def test_a_client_that_is_behind_pauses_and_gets_everything(serve, app: App) -> None:
    with serve().connect() as sock:
        sock.sendall(request("/flood"))
        assert until(lambda: app.paused)
        assert app.streams[0].paused
        assert app.streams[0].buffered > 0
        app.go_on.set()
        got = read_until(sock, b"three/flood")
        while not got.endswith(b"3\r\nend\r\n0\r\n\r\n"):
            got += sock.recv(1 << 20)
        assert not app.streams[0].paused
    assert got.count(b"c350\r\n" + b"x" * 50_000 + b"\r\n") == got.count(b"\r\nc350\r\n")
    assert app.lost == 0


def test_a_cut_client_is_closed_with_what_it_did_not_read(serve, app: App) -> None:
    served = serve()
    with served.connect() as sock:
        sock.sendall(request("/flood"))
        assert until(lambda: app.paused)
        stream = app.streams[0]
        asyncio.run_coroutine_threadsafe(_call(stream.cut), stream._protocol.loop).result(5)
        assert until(lambda: app.lost == 1)
        with contextlib.suppress(ConnectionResetError):
            rest(sock)


async def _call(function: Callable[[], None]) -> None:
    function()


def test_an_idle_connection_is_closed_and_a_streaming_one_is_not(serve, app: App) -> None:
    with serve(timeout_keep_alive=1).connect() as sock:
        sock.sendall(request("/a"))
        read_until(sock, answer("/a"))
        sock.sendall(request("/hold"))
        got = read_until(sock, b"three/hold")
        assert not until(lambda: app.lost, 1.3)
        app.go_on.set()
        assert (got + rest(sock)).endswith(answer("/hold"))


def test_a_client_may_ask_for_the_end_of_the_connection(serve) -> None:
    with serve().connect() as sock:
        sock.sendall(request("/a", head="connection: close\r\n"))
        assert rest(sock).endswith(answer("/a"))


def test_a_server_that_stops_lets_a_response_end(serve, app: App) -> None:
    served = serve()
    with served.connect() as sock, served.connect() as idle:
        idle.sendall(request("/a"))
        read_until(idle, answer("/a"))
        sock.sendall(request("/hold"))
        got = read_until(sock, b"three/hold")
        served.server.should_exit = True
        assert rest(idle) == b""
        app.go_on.set()
        assert (got + rest(sock)).endswith(answer("/hold"))
    served.thread.join(10)
    assert not served.thread.is_alive()
