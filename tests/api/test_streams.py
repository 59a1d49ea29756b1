"""Every accepted request has exactly one end, whatever happens to its peers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servekit.messages.batches import BatchStrOutput, FinishReason
from servekit.messages.envelope import Envelope, Kind
from servekit.messages.requests import TokenizedGenerateReqInput

from tests.api.fakes import FakeServer, events, says_nothing, until

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 500}


def one_piece(control: Any, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
    """A rank that says one token and then nothing."""
    control.row(envelope.id, "one", prompt=envelope.tokens, done=1)


@pytest.fixture(autouse=True)
def nothing_is_left(server: FakeServer) -> Iterator[None]:
    yield
    assert until(lambda: server.worker.manager.live_requests() == [])
    assert until(lambda: (server.page.requests, server.page.tokens) == (0, 0))


def ends_with_one_error(raw: bytes) -> dict[str, Any]:
    """Checks a stream that began and failed; returns the error."""
    *chunks, error, done = events(raw)
    assert done == "[DONE]"
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert all("choices" in chunk for chunk in chunks)
    assert not any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])
    return error["error"]


class Open:
    """A request whose answer is read step by step."""

    def __init__(self, server: FakeServer, **body: object) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(10)
        # A client that does not read shall be noticed after less than the kernel would keep for it.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        self.socket.connect(server.address)
        raw = json.dumps({**BODY, **body}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self.socket.sendall(head + b"content-length: %d\r\n\r\n" % len(raw) + raw)

    def read(self, wanted: bytes) -> bytes:
        got = b""
        while wanted not in got:
            part = self.socket.recv(65536)
            assert part, got
            got += part
        return got

    def rest(self) -> bytes:
        got = b""
        while part := self.socket.recv(65536):
            got += part
        return got

    def __enter__(self) -> Open:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def dechunk(raw: bytes) -> bytes:
    """The body of a response with chunked encoding, of which the head and some chunks may have been read before."""
    raw = raw.partition(b"\r\n\r\n")[2] if raw.startswith(b"HTTP") else raw
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        body, raw = body + raw[: int(size, 16)], raw[int(size, 16) + 2 :]
    return body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_aborts_its_request(server: FakeServer, stream: bool, n: int) -> None:
    server.control.script = one_piece if stream else says_nothing
    with Open(server, stream=stream, n=n) as request:
        assert until(lambda: len(server.control.generated) == n)
        if stream:
            request.read(b"one")
    assert until(lambda: len(server.control.aborted) == n)
    assert until(lambda: server.page.counters.get("aborted") == n)
    assert sorted(server.control.aborted) == sorted(envelope.id for envelope, _ in server.control.generated)


def test_a_client_that_leaves_before_the_first_token(server: FakeServer) -> None:
    server.control.script = says_nothing
    with Open(server, stream=True):
        assert until(lambda: server.control.generated)
    assert until(lambda: server.control.aborted)


def test_a_client_that_leaves_while_its_prompt_is_tokenized(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = server.worker.manager
    begun = []
    noticed = threading.Event()

    def slow(texts: list[str], special: bool = True) -> list[list[int]]:
        begun.extend(texts)
        noticed.wait(10)
        return [[1, 2, 3]]

    monkeypatch.setattr(manager.encoder, "encode_prompts", slow)
    with Open(server, prompt="x" * 30_000):
        assert until(lambda: begun)
        assert httpx.get(server.url + "/health", timeout=5).status_code == 200
    assert until(lambda: all(job.gone for job in list(manager._jobs)))
    noticed.set()
    assert until(lambda: server.page.requests == 0)
    assert server.control.generated == []


def test_leaving_after_the_end_aborts_nothing(server: FakeServer) -> None:
    for stream in (True, False):
        with Open(server, stream=stream) as request:
            assert b"200 OK" in request.rest()
    assert httpx.get(server.url + "/health").status_code == 200
    assert server.control.aborted == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 503])
def test_a_refusal_before_the_first_byte_is_a_plain_answer(server: FakeServer, stream: bool, status: int) -> None:
    def refuse(control: Any, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        control.row(envelope.id, finish=FinishReason("error", message="no room", status=status))

    server.control.script = refuse
    response = httpx.post(server.url + "/v1/completions", json={**BODY, "stream": stream})
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["message"] == "no room"
    assert ("retry-after" in response.headers) == (status == 503)


def test_an_error_in_the_middle_ends_the_stream(server: FakeServer) -> None:
    def fail(control: Any, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        one_piece(control, envelope, body)
        time.sleep(0.05)
        control.row(envelope.id, "two", FinishReason("error", message="lost", status=500))

    server.control.script = fail
    response = httpx.post(server.url + "/v1/completions", json={**BODY, "stream": True})
    assert response.status_code == 200
    error = ends_with_one_error(response.content)
    assert (error["message"], error["type"]) == ("lost", "server_error")
    assert "".join(e["choices"][0]["text"] for e in events(response.content)[:-2]) == "onetwo"


def test_one_choices_error_aborts_the_others(server: FakeServer) -> None:
    def fail_second(control: Any, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        one_piece(control, envelope, body)
        if len(control.generated) == 2:
            control.row(envelope.id, finish=FinishReason("error", message="lost", status=500))

    server.control.script = fail_second
    ends_with_one_error(httpx.post(server.url + "/v1/completions", json={**BODY, "stream": True, "n": 2}).content)
    assert until(lambda: server.control.aborted == [server.control.generated[0][0].id])


@pytest.mark.parametrize("stream", [True, False])
def test_pieces_far_apart_add_up(server: FakeServer, stream: bool) -> None:
    def script(control: Any, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        for i, piece in enumerate("abc"):
            control.row(envelope.id, piece, FinishReason("stop") if piece == "c" else None, done=i + 1)
            time.sleep(0.05)

    server.control.script = script
    response = httpx.post(server.url + "/v1/completions", json={**BODY, "stream": stream})
    if stream:
        assert [e["choices"][0]["text"] for e in events(response.content)[:-1]] == ["a", "b", "c"]
    else:
        assert response.json()["choices"][0]["text"] == "abc"


def test_rows_after_the_end_are_nothing(server: FakeServer, http: httpx.Client) -> None:
    def twice(control: Any, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        for _ in range(2):
            control.row(envelope.id, "x", FinishReason("stop"), prompt=2, done=1)
        control.row(envelope.id ^ 1, "y", FinishReason("stop"))

    server.control.script = twice
    *chunks, done = events(http.post("/v1/completions", json={**BODY, "stream": True}).content)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["stop"]
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_a_silent_control_process_ends_its_requests(server: FakeServer, stream: bool) -> None:
    server.control.script = one_piece if stream else says_nothing
    with Open(server, stream=stream) as request:
        begun = request.read(b"one") if stream else b""
        assert until(lambda: server.control.generated)
        server.page.age = 6.0
        raw = begun + request.rest()
    assert until(lambda: server.control.aborted), "what is still alive behind a silent control process must end as well"
    if stream:
        assert ends_with_one_error(dechunk(raw))["type"] == "server_error"
    else:
        assert raw.startswith(b"HTTP/1.1 503")


def test_lost_frames_end_all_streams(server: FakeServer) -> None:
    server.control.script = one_piece
    with Open(server, stream=True) as first, Open(server, stream=True) as second:
        raw = [first.read(b"one"), second.read(b"one")]
        rid = server.control.generated[0][0].id
        server.control.send(Envelope(Kind.BATCH_STR, rows=0), BatchStrOutput([]), rid, skip=2)
        raw = [raw[0] + first.rest(), raw[1] + second.rest()]
    for each in raw:
        assert "lost" in ends_with_one_error(dechunk(each))["message"]


@pytest.mark.parametrize("fields", [{"sender_epoch": 2}, {"receiver_epoch": 9}])
def test_frames_of_another_life_are_dropped(server: FakeServer, fields: dict[str, int]) -> None:
    def script(control: Any, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        stale = BatchStrOutput([envelope.id], [], [FinishReason("stop")], output_strs=["stale"])
        control.send(Envelope(Kind.BATCH_STR, rows=1), stale, envelope.id, **fields)
        control._seq -= 1
        control.row(envelope.id, "fresh", FinishReason("stop"))

    server.control.script = script
    answer = httpx.post(server.url + "/v1/completions", json=BODY).json()
    assert answer["choices"][0]["text"] == "fresh"
    assert httpx.get(server.url + "/debug/state").json()["worker"]["fenced"] >= 1


def test_garbage_from_the_control_process_hurts_nobody(server: FakeServer) -> None:
    def script(control: Any, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        control.send(Envelope(Kind.BATCH_STR, rows=1), {"not": "a batch"}, envelope.id)
        control.send(Envelope(Kind.BATCH_STR, rows=2), BatchStrOutput([envelope.id, 7], output_strs=["x"]), envelope.id)
        control.send(Envelope(Kind.KV_EVENT), None, envelope.id)
        control.send(Envelope(Kind.CONTROL_REPLY, 12345), None, envelope.id)
        control.row(envelope.id, "fine", FinishReason("stop"))

    server.control.script = script
    assert httpx.post(server.url + "/v1/completions", json=BODY).json()["choices"][0]["text"].endswith("fine")
    counters = httpx.get(server.url + "/debug/state").json()["worker"]
    assert counters["malformed"] >= 2
    assert counters["unknown"] >= 1


def test_main_can_end_all_streams(server: FakeServer) -> None:
    server.control.script = one_piece
    with Open(server, stream=True) as request:
        raw = request.read(b"one")
        server.command(command="fail_streams", message="scheduler[dp=0] died")
        raw += request.rest()
    assert ends_with_one_error(dechunk(raw))["message"] == "scheduler[dp=0] died"
    assert until(lambda: server.control.aborted)


def test_stop_ends_streams_and_the_process(own_server, server: FakeServer) -> None:
    mine = own_server()
    mine.control.script = one_piece
    with Open(mine, stream=True) as request, Open(mine, prompt="idle", stream=True) as slow:
        raw = request.read(b"one")
        slow.read(b"one")
        began = time.monotonic()
        mine.command(command="stop", message="the server is shutting down")
        raw += request.rest()
        mine.thread.join(5)
    assert not mine.thread.is_alive()
    assert time.monotonic() - began < 3
    assert "shutting down" in ends_with_one_error(dechunk(raw))["message"]


def test_a_long_answer_that_is_no_stream_is_nobodys_backlog(server: FakeServer, http: httpx.Client) -> None:
    def at_once(control: Any, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        control.row(envelope.id, "x" * (5 << 20), FinishReason("length"), prompt=envelope.tokens, done=500)

    server.control.script = at_once
    answer = http.post("/v1/completions", json=BODY)
    assert len(answer.json()["choices"][0]["text"]) == 5 << 20


def test_a_client_that_does_not_read_does_not_hold_the_others(server: FakeServer) -> None:
    piece = "x" * 60_000

    def flood(control: Any, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        if len(control.generated) > 1:
            control.row(envelope.id, "quick", FinishReason("stop"))
            return
        for i in range(400):
            control.row(envelope.id, piece, done=i)

    server.control.script = flood
    with Open(server, stream=True) as slow:
        assert until(lambda: server.control.aborted), "a client that leaves megabytes unread is cut off"
        assert httpx.post(server.url + "/v1/completions", json=BODY).json()["choices"][0]["text"] == "quick"
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while part := slow.socket.recv(1 << 20):
                got += part
    assert not got.endswith(b"0\r\n\r\n"), "an answer with a hole must not end like a whole one"
