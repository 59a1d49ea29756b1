"""Whatever is wrong with a request, the answer is OpenAI's error object with the right status, and names the field."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from typing import Any

import httpx
import pytest

from tests.api.fakes import FakeServer, says, until

HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def error_of(response: httpx.Response, *status: int) -> dict[str, Any]:
    assert response.status_code in (status or (400,)), response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].strip()
    assert "Traceback" not in response.text
    return error


def chat(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post(CHAT, json={"model": "tiny", "messages": HI, **body})


def complete(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post(COMPLETIONS, json={"model": "tiny", "prompt": "hi", **body})


@pytest.fixture(autouse=True)
def nothing_is_left(server: FakeServer):
    """A refused request leaves no reservation and reaches no rank."""
    yield
    assert server.page.requests == 0
    assert server.page.tokens == 0


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"not json", b"[]", b'"text"', b"null", b"17", b'{"model": "tiny",}',
        b'{"model": "tiny", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "\xff"}', b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"x": ' + b'{"x":' * 100_000, b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: repr(body[:30]),
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_object(http: httpx.Client, path: str, body: bytes) -> None:
    error_of(http.post(path, content=body, headers=JSON))


@pytest.mark.parametrize("depth", [100, 300, 500, 700, 800, 900, 950, 990, 2000])
def test_depth_is_never_a_fault_of_the_server(http: httpx.Client, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    start = '{"model": "tiny", "messages": [{"role": "user", "content": "x"}], '
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"a": ' + deep + "}}}"
    for body in (
        start + '"chat_template_kwargs": {"a": ' + deep + "}}",
        start + '"tools": [' + tool + "]}",
        start + '"metadata": ' + deep + "}",
    ):
        assert http.post(CHAT, content=body, headers=JSON).status_code in (200, 400)


def test_numbers_beyond_all_range(http: httpx.Client) -> None:
    body = b'{"model": "tiny", "temperature": 1e999, "prompt": "hi"}'
    assert error_of(http.post(COMPLETIONS, content=body, headers=JSON))["param"] == "temperature"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, "hot", [1]]), ("top_p", [-0.1, 0, 1.5, "x"]), ("top_k", [-7, 1.5, "x"]),
        ("min_p", [-1, 2]),
        ("max_tokens", [-1, "ten", 1.5]), ("min_tokens", [-1]), ("n", [0, -1, 1.5, "many", 10**6]),
        ("seed", ["x", 1.5]),
        ("stop", [5, [1], ["x"] * 1000]), ("stream", ["maybe", 1]), ("stream_options", ["x", {"include_usage": True}]),
        ("stop_token_ids", [[-1], ["x"], [2**40]]), ("frequency_penalty", [2.5, -2.5, "big", 9]),
        ("presence_penalty", [2.5, -3]),
        ("logit_bias", ["x", {"1": "x"}, {"99999999": 1}, {"-1": 1}, {"259": 1}, {"1": 101}, {"x": 1}, {"1": None}]),
        ("repetition_penalty", [0, -1, "x"]), ("stop_token_ids", [[259]]), ("data_parallel_rank", [-1, 99, "x", 1.5]),
        ("bootstrap_room", [-1, "x", 1.5, 2**64]), ("bootstrap_port", [0, 70000]), ("response_format", [{}, "json", 5]),
        ("min_tokens", [10**9]), ("model", [5]),
    ],
)  # fmt: skip
def test_wrong_values_name_their_field(
    server: FakeServer, http: httpx.Client, field: str, values: list[object]
) -> None:
    for value in values:
        for ask in (chat, complete):
            assert error_of(ask(http, **{field: value}))["param"].startswith(field), value
    assert server.control.generated == []


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("regex", "a", None), ("ebnf", "a", None), ("grammar", "a", None), ("json_schema", "{", None),
        ("guided_json", {}, None),
        ("guided_regex", "(", None), ("guided_grammar", "a", None), ("guided_choice", ["a"], None),
        ("structured_outputs", {"regex": "a"}, None), ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}, None), ("prompt_logprobs", 1, None),
        ("use_beam_search", True, False), ("bad_words", ["x"], []), ("allowed_token_ids", [1], None),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(
    server: FakeServer, http: httpx.Client, field: str, value: object, neutral: object
) -> None:
    for ask in (chat, complete):
        error = error_of(ask(http, **{field: value}))
        assert error["param"] == field
        assert error["code"] == "unsupported_parameter"
        assert field in error["message"]
        assert ask(http, **{field: neutral}).status_code == 200
        assert ask(http, **{field: None}).status_code == 200


def test_what_one_route_does_not_build(http: httpx.Client) -> None:
    for body in (
        {"top_logprobs": 2},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function"}},
        {"functions": [{}]},
    ):
        assert error_of(chat(http, **body))["param"] == next(iter(body))
    for body in (
        {"suffix": "x"},
        {"best_of": 2, "stream": True},
        {"n": 2, "best_of": 1},
        {"logprobs": -1},
        {"logprobs": 21},
        {"top_logprobs": 2},
    ):
        assert error_of(complete(http, **body))["param"] in body
    assert chat(http, logprobs=False, tool_choice="none").status_code == 200
    assert complete(http, n=2, best_of=2, suffix="").status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        None, [], "hello", [123], [{}], [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}], [*HI, {}],
        [{"role": "bot", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": None}], {"role": "user"},
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": ["x"]}], [{"role": "assistant", "tool_calls": [{"function": {}}]}],
    ],
)  # fmt: skip
def test_malformed_messages(http: httpx.Client, messages: object) -> None:
    assert error_of(chat(http, messages=messages))["param"].startswith("messages")


@pytest.mark.parametrize(
    "tools",
    ["x", [1], [{}], [{"type": "function"}], [{"type": "function", "function": {"parameters": {}}}],
     [{"type": "function", "function": {"name": "a", "parameters": "x"}}],
     [{"type": "function", "function": {"name": ""}}],
     [{"type": "function", "function": {"name": 5}}]],
)  # fmt: skip
def test_malformed_tools(http: httpx.Client, tools: object) -> None:
    assert error_of(chat(http, tools=tools))["param"].startswith("tools")


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], "", 5, {"a": 1}, ["a", 1], [1, [2]], [-1], [10**6], [[1], [10**6]], [1.5]]
)
def test_malformed_prompts(http: httpx.Client, prompt: object) -> None:
    assert error_of(complete(http, prompt=prompt))["param"].startswith("prompt")


def test_null_is_absent(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()["components"]["schemas"]
    for ask, name in ((chat, "ChatCompletionRequest"), (complete, "CompletionRequest")):
        for field in set(document[name]["properties"]) - {"model", "messages", "prompt"}:
            assert ask(http, **{field: None}).status_code == 200, field


def test_unknown_fields_are_ignored(http: httpx.Client) -> None:
    assert chat(http, foo=1, **{"x" * 500: [None]}, metadata={"a": "b"}, store=True).status_code == 200


def test_models_by_name(http: httpx.Client) -> None:
    for ask in (chat, complete):
        assert error_of(ask(http, model="other"), 404)["code"] == "model_not_found"
        assert error_of(ask(http, model=None))["param"] == "model"
    error_of(http.get("/v1/models/other"), 404)


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    error_of(http.get("/v1/nope"), 404)
    response = http.get(CHAT)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    assert http.delete("/health").headers["allow"] == "GET, HEAD"
    error_of(http.delete("/v1/models"), 405)


def test_the_context_error_says_how_many_came_and_how_many_fit(http: httpx.Client) -> None:
    for response in (complete(http, prompt="x" * 1234), complete(http, prompt="x" * 1234, stream=True)):
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert "1234" in error["message"]
        # Clients look for these words.
        assert "this model's maximum context length is" in error["message"]
        assert "999" in error["message"]
    error_of(chat(http, messages=[{"role": "user", "content": "x" * 50_000}]))
    assert complete(http, prompt="x" * 999).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "junk"]
)
def test_other_content_types(http: httpx.Client, kind: str) -> None:
    body = json.dumps({"model": "tiny", "messages": HI})
    error_of(http.post(CHAT, content=body, headers={"content-type": kind}), 415)
    for good in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"):
        assert http.post(CHAT, content=body, headers={"content-type": good}).status_code == 200


def test_large_bodies(own_server) -> None:
    server = own_server({"max_body_size": 2000})
    with httpx.Client(base_url=server.url) as http:
        body = json.dumps({"model": "tiny", "prompt": "hi", "user": "x" * 3000}).encode()
        error_of(http.post(COMPLETIONS, content=body, headers=JSON), 413)
        error_of(http.post(COMPLETIONS, content=iter([body[:1500], body[1500:]]), headers=JSON), 413)
        assert (
            http.post(COMPLETIONS, content=json.dumps({"model": "tiny", "prompt": "hi"}), headers=JSON).status_code
            == 200
        )


@pytest.mark.parametrize(
    ("most", "choices"), [(16 << 10, {}), (8 << 10, {"n": 128}), (1 << 10, {"prompt": ["hi"] * 8, "n": 128})]
)
def test_stop_strings_are_bounded_by_what_all_choices_need(
    http: httpx.Client, most: int, choices: dict[str, Any]
) -> None:
    stops = ["é" * 512] * (most >> 10)
    assert complete(http, stop=stops, **choices).status_code == 200
    assert error_of(complete(http, stop=[*stops, "x"], **choices))["param"] == "stop"


def test_errors_leave_the_connection_usable(server: FakeServer, http: httpx.Client) -> None:
    for _ in range(3):
        error_of(chat(http, messages="hello"))
        assert chat(http).status_code == 200


def exchange(server: FakeServer, *pieces: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to these bytes, from a connection that the server closes."""
    answer = b""
    with socket.create_connection(server.address, timeout=5) as sock, contextlib.suppress(ConnectionError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            sock.sendall(piece)
        while part := sock.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("nonsense", [b"nonsense\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n"])
def test_what_is_no_http_gets_an_error_too(server: FakeServer, nonsense: bytes) -> None:
    head, body = exchange(server, nonsense)
    assert b" 400 " in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


def completion(head: bytes = b"", **fields: object) -> bytes:
    """A request for a completion, as it goes over the wire."""
    body = json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode()
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%b\r\n%b" % (
        COMPLETIONS.encode(),
        len(body),
        head,
        body,
    )


BROKEN_BODY = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n"


@pytest.mark.parametrize(
    "behind",
    [b"nonsense\r\n\r\n", b"GET /version HTTP/1.1\r\nx: " + b"y" * (1 << 20), BROKEN_BODY, completion() + BROKEN_BODY],
    ids=["no HTTP", "a large head", "a broken body", "a good request and a broken body"],
)
def test_a_refusal_waits_for_the_answers_before_it(server: FakeServer, behind: bytes) -> None:
    server.control.script = says("a", "b", "c", "d", pause=0.05)
    head, rest = exchange(server, completion(stream=True) + behind)
    assert head.startswith(b"HTTP/1.1 200")
    stream, more, refusal = rest.partition(b"0\r\n\r\nHTTP/1.1 ")
    assert b"HTTP/1.1" not in stream and stream.count(b'"text"') == 4 and stream.endswith(b"data: [DONE]\n\n\r\n")
    if behind.startswith(b"POST /v1"):
        assert refusal.startswith(b"200")
        _, more, refusal = refusal.partition(b"HTTP/1.1 ")
    assert more and refusal[:3] in (b"400", b"431")
    assert json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_a_refused_body_ends_the_connection_at_once(server: FakeServer) -> None:
    head, body = exchange(server, BROKEN_BODY)
    assert b" 400 " in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert until(lambda: not server.worker._server.server_state.tasks), "the handler is done as well"


@pytest.mark.parametrize("whole", [True, False], ids=["at once", "byte by byte"])
def test_an_offered_upgrade_is_passed_over(server: FakeServer, whole: bool) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hi"}).encode()
    request = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%b\r\n%b"
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"
    sent = request % (COMPLETIONS.encode(), len(body), offer, body)
    sent += request % (COMPLETIONS.encode(), len(body), b"connection: close\r\n", body)
    pieces = [sent] if whole else [sent[i : i + 1] for i in range(len(sent))]
    head, rest = exchange(server, *pieces)
    assert b" 200 " in head
    assert rest.count(b"HTTP/1.1 200") == 1, "the second request on the connection"


def test_any_number_of_offers_in_one_packet_is_passed_over(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    offer = b"HEAD /version HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    head, rest = exchange(server, offer * 2000 + b"HEAD /version HTTP/1.1\r\nconnection: close\r\n\r\n")
    assert (head + rest).count(b"HTTP/1.1 405") == 2001
    assert not caplog.records


@pytest.mark.parametrize("length", [10**8, 2**63, 2**64 - 1])
def test_a_length_that_is_too_large_is_refused_before_the_body(server: FakeServer, length: int) -> None:
    with socket.create_connection(server.address, timeout=5) as sock:
        sock.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length)
        assert b" 413 " in sock.recv(4096)


def test_whole_numbers_may_be_written_as_floats(http: httpx.Client, server: FakeServer) -> None:
    body = {"model": "tiny", "prompt": [72.0, 105.0], "max_tokens": 2.0, "n": 1.0, "top_k": 5.0, "temperature": 1.0}
    assert http.post(COMPLETIONS, json=body).status_code == 200
    params = server.control.generated[0][1].sampling_params
    assert (params.max_new_tokens, params.top_k, params.temperature) == (2, 5, 1.0)
    for field, value in {"max_tokens": 1.5, "n": 1e300, "top_k": 2.0**60, "stop": 1.0}.items():
        assert error_of(http.post(COMPLETIONS, json={**body, field: value}))["param"] == field


def test_a_value_is_not_repeated_at_length(http: httpx.Client) -> None:
    error = error_of(http.post("/v1/embeddings", json={"model": "tiny", "encoding_format": "x" * 100_000}))
    assert error["param"] == "encoding_format"
    assert len(error["message"]) < 2000


def test_heads_are_bounded(server: FakeServer) -> None:
    start = b"GET /version HTTP/1.1\r\nconnection: close\r\n"
    for header in (b"x-large: " + b"y" * (1 << 20), b"x: y\r\n" * (1 << 18)):
        head, body = exchange(server, start, header)
        assert b" 431 " in head
        assert json.loads(body)["error"]["code"] == "invalid_http"
    head, _ = exchange(server, start, b"x-long: " + b"y" * (32 << 10), b"\r\n\r\n")
    assert b" 200 " in head


def test_what_is_only_logged_can_not_fail(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "servekit.http.body"):
        assert chat(http, unknown=1).status_code == 200
        assert "unknown" in caplog.text
        body = b'{"model": "tiny", "prompt": "hi", "x": 1e400}'
        assert http.post(COMPLETIONS, content=body, headers=JSON).status_code == 200
