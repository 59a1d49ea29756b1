"""Routes that say how the server is."""

from __future__ import annotations

import httpx
import pytest

from tests.api.fakes import FakeServer, says_nothing, until

BODY = {"model": "tiny", "prompt": "hi"}


def test_models_tell_the_context(http: httpx.Client) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 1000)
    assert isinstance(card["created"], int)
    assert http.get("/v1/models/tiny").json() == card


@pytest.mark.parametrize(
    ("change", "health", "ready"),
    [
        ({}, 200, 200),
        ({"phase": 0, "ready_once": False}, 503, 503),
        ({"phase": 2}, 200, 503),
        ({"phase": 3}, 200, 503),
        ({"age": 6.0}, 503, 503),
        ({"age": float("inf")}, 503, 503),
        ({"active": [False]}, 503, 503),
        ({"active": [True, False]}, 200, 200),
        ({"full": True}, 200, 503),
    ],
)
def test_health_and_ready(server: FakeServer, http: httpx.Client, change: dict, health: int, ready: int) -> None:
    server.page.__dict__.update(change)
    down = [rank for rank, active in enumerate(server.page.active) if not active]
    for path, status in (("/health", health), ("/ready", ready)):
        response = http.get(path)
        assert response.status_code == status
        assert response.json()["ranks_down"] == down
        assert ("error" in response.json()) == (status == 503)
    if ready == 503 and server.page.active == [True]:
        response = http.post("/v1/completions", json=BODY)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert server.control.generated == []


def test_what_runs_and_waits_is_bounded(own_server) -> None:
    server = own_server({"max_queued_requests": 2})
    server.control.script = says_nothing
    with httpx.Client(base_url=server.url, timeout=0.3) as http:
        # The rank runs 8 at once, and 2 may wait.
        assert http.post("/v1/completions", json={**BODY, "n": 11}).status_code == 503
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={**BODY, "n": 10})
    assert until(lambda: server.page.requests == 0)


def test_server_info(http: httpx.Client) -> None:
    info = http.get("/server_info").json()
    assert info["worker"]["index"] == 0
    assert info["worker"]["epoch"] == 1
    assert info["worker"]["pid"] > 0
    assert info["scheduler_info"] == [{"max_running_requests": 8, "device": "none"}]
    assert info["server_args"]["data_parallel_size"] == 1
    assert info["version"] == http.get("/version").json()["version"]


def test_debug_state_names_who_did_not_answer(server: FakeServer, http: httpx.Client) -> None:
    state = http.get("/debug/state").json()
    assert state["control"] == {"in_flight": 0}
    assert state["ranks"] == {"0": {"running": 0}, "1": None}
    assert state["no_answer"] == ["scheduler[dp=1]"]
    assert state["state_page"]["phase"] == 1


def test_debug_state_without_control(server: FakeServer, http: httpx.Client) -> None:
    states, server.control.states = server.control.states, {}
    try:
        assert http.get("/debug/state").json()["no_answer"] == ["control"]
    finally:
        server.control.states = states


def test_debug_state_shows_live_requests(server: FakeServer, http: httpx.Client) -> None:
    server.control.states[1] = {"running": 0}
    server.control.script = says_nothing
    try:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=BODY, timeout=0.2)
        assert until(lambda: http.get("/debug/state").json()["worker"]["requests"] == [])
    finally:
        del server.control.states[1]


def test_tokenize_and_back(http: httpx.Client) -> None:
    text = "é 漢字 <|im_end|>\n"
    answer = http.post("/tokenize", json={"model": "tiny", "prompt": text}).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 1000
    assert 258 in answer["tokens"]
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"].startswith("<|im_start|>user\nhi")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/tokenize", {"prompt": "x", "messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "x"}), ("/detokenize", {"tokens": [1.5]}), ("/detokenize", {"tokens": None}),
        ("/detokenize", {"tokens": [10**6]}),
    ],
)  # fmt: skip
def test_tokenize_refuses(http: httpx.Client, path: str, body: dict) -> None:
    assert http.post(path, json=body).status_code == 400


def test_the_openapi_document_describes_the_bodies(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].rpartition("/")[2]
    properties = document["components"]["schemas"][name]["properties"]
    assert {"messages", "temperature", "max_completion_tokens"} <= set(properties)
    assert {"minimum": 0, "type": "number"} in properties["temperature"]["anyOf"]
    for path in document["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
            assert operation["responses"]["4XX"]["content"]["application/json"]["schema"]["$ref"].endswith(
                "/ErrorResponse"
            )
    assert not any("Validation" in name for name in document["components"]["schemas"])
    assert http.get("/openapi.json").json() == document
