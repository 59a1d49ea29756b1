"""The same answers whichever way a request takes: past FastAPI or through it, past the event loop's tasks or not."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Request
from fastapi.testclient import TestClient
from servekit.http import errors
from servekit.http.protocol import EXTENSION
from servekit.http.short_way import Application
from servekit.messages.batches import FinishReason
from servekit.messages.envelope import Envelope
from servekit.messages.requests import TokenizedGenerateReqInput
from servekit.tokenizer.refusal import Refusal
from starlette.responses import PlainTextResponse, Response

from tests.api.fakes import FakeServer, events, says, until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
TEXT = {"model": "tiny", "prompt": ["a", "b"], "stream": True, "n": 2, "echo": True}
BODIES = {
    "chat": ("/v1/chat/completions", CHAT),
    "usage": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "usage in each": ("/v1/chat/completions", {**CHAT, "stream_options": {"continuous_usage_stats": True}}),
    "ids": ("/v1/chat/completions", {**CHAT, "return_token_ids": True}),
    "choices": ("/v1/completions", TEXT),
}
PIECES = ["Hello", ' "wörld"\n', "\u2028\u0085 \t\\", "", "😀", "!"]


@pytest.fixture
def plain_server(server: FakeServer) -> Iterator[FakeServer]:
    """The same worker behind a server that knows nothing of the extension."""
    config = server.worker._server.config
    app = config.loaded_app

    async def without(scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"].pop(EXTENSION)
        await app(scope, receive, send)

    config.loaded_app = without
    yield server
    config.loaded_app = app


def ask(server: FakeServer, path: str, body: dict[str, Any]) -> Any:
    """The events of a stream, without what differs from answer to answer."""
    server.control.script = says(*PIECES, pause=0.002)
    raw = httpx.post(server.url + path, json=body).content
    raw = re.sub(rb'"id":"[a-z]+-[0-9a-f]+"|"created":\d+', b'"id":0', raw)
    return events(raw)


@pytest.mark.parametrize("name", BODIES)
def test_streams_are_the_same_without_the_extension(
    server: FakeServer, plain_server: FakeServer, name: str, request: pytest.FixtureRequest
) -> None:
    plain = ask(plain_server, *BODIES[name])
    config = server.worker._server.config
    without, config.loaded_app = config.loaded_app, server.worker._server.config.app
    try:
        fast = ask(server, *BODIES[name])
    finally:
        config.loaded_app = without
    for index in {choice["index"] for event in plain[:-1] for choice in event["choices"]}:
        assert texts(plain, index) == texts(fast, index)
        assert texts(fast, index).endswith("".join(PIECES))
        assert ends(plain, index) == ends(fast, index)
    assert plain[-1] == fast[-1] == "[DONE]"


def ends(found: Any, index: int) -> list[str]:
    choices = [choice for event in found[:-1] for choice in event["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


def texts(found: Any, index: int) -> str:
    choices = [choice for event in found[:-1] for choice in event["choices"] if choice["index"] == index]
    return "".join(choice.get("delta", choice).get("content", choice.get("text")) or "" for choice in choices)


def test_text_goes_past_the_jobs_and_everything_is_counted(server: FakeServer, http: httpx.Client) -> None:
    manager = server.worker.manager
    seen: list[int] = []

    def script(control: Any, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        for i in range(1, 21):
            control.row(envelope.id, f" {i}", FinishReason("length") if i == 20 else None, prompt=2, done=i)
            if i == 10:
                assert until(lambda: manager._direct.tokens(envelope.id) == 10)
                seen.extend(each["completion_tokens"] for each in manager.live_requests())
            elif i == 1:
                assert until(lambda: manager._direct.tokens(envelope.id) == 1)

    server.control.script = script
    found = events(http.post("/v1/chat/completions", json={**CHAT, "stream_options": {"include_usage": True}}).content)
    assert seen == [10]
    assert found[-2]["usage"]["completion_tokens"] == 20
    assert texts(found[:-2] + found[-1:], 0) == "".join(f" {i}" for i in range(1, 21))
    assert until(lambda: len(manager._direct) == 0)


def test_a_client_that_falls_behind_and_catches_up_loses_nothing(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than any kernel keeps for a connection, and no reason to cut the client.
    piece, count = "x" * 40_000, 250
    monkeypatch.setattr("servekit.tokenizer.state.MAX_UNREAD", 1 << 30)

    def flood(control: Any, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        for i in range(1, count + 1):
            control.row(envelope.id, piece, FinishReason("length") if i == count else None, prompt=2, done=i)
        said.set()

    said = threading.Event()
    server.control.script = flood
    body = json.dumps({**TEXT, "prompt": "a", "n": 1}).encode()
    with socket.socket() as sock:
        # The kernel takes little for a client that wants little at a time.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        sock.settimeout(20)
        sock.connect(server.address)
        sock.sendall(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        assert until(lambda: said.is_set() and not server.worker.manager.live_requests(), 20)
        raw = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    found = events(raw.partition(b"\r\n\r\n")[2])
    assert found[-1] == "[DONE]"
    assert texts(found, 0) == "a" + piece * count
    assert len(found) < count, "what waited for the client is merged"


class Marks:
    """Middleware as a contributor writes it."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def mark(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-mark", b"1"))
            await send(message)

        await self.app(scope, receive, mark)


@pytest.fixture
def client() -> TestClient:
    router = APIRouter()

    @router.get("/plain")
    async def plain(request: Request) -> Response:
        return PlainTextResponse(request.query_params.get("q", "none"))

    @router.get("/refused")
    async def refused(request: Request) -> Response:
        raise Refusal(418, "no coffee")

    @router.get("/broken")
    async def broken(request: Request) -> Response:
        raise ZeroDivisionError

    @router.get("/items/{item}")
    async def item(item: int, q: str = "none") -> dict[str, Any]:
        return {"item": item, "q": q}

    app = Application()
    app.include_directly([router])
    app.add_middleware(Marks)
    errors.install(app)
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("path", "status", "check"),
    [
        ("/plain?q=a%20b", 200, lambda r: r.text == "a b"),
        ("/refused", 418, lambda r: r.json()["error"]["message"] == "no coffee"),
        ("/broken", 500, lambda r: r.json()["error"]["type"] == "server_error"),
        ("/items/7?q=x", 200, lambda r: r.json() == {"item": 7, "q": "x"}),
        ("/items/x", 400, lambda r: r.json()["error"]["param"] == "item"),
        ("/nowhere", 404, lambda r: r.json()["error"]["type"] == "not_found_error"),
    ],
)
def test_endpoints_are_called_or_left_to_fastapi(
    client: TestClient, path: str, status: int, check: Callable[[httpx.Response], bool]
) -> None:
    response = client.get(path)
    assert response.status_code == status
    assert check(response)
    assert response.headers["x-mark"] == "1", "middleware stands around both ways"


def test_methods_and_the_schema_stay_fastapis(client: TestClient) -> None:
    assert client.post("/plain").status_code == 405
    assert set(client.get("/openapi.json").json()["paths"]) == {"/plain", "/refused", "/broken", "/items/{item}"}
