"""`/generate` against a scripted control process."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from servekit.messages.batches import FinishReason
from servekit.messages.envelope import Envelope, Ext, decode_text_ext
from servekit.messages.requests import TokenizedGenerateReqInput
from servekit.tokenizer.encoding import pack_ids, unpack_ids

from tests.api.fakes import FakeControl, FakeServer, events
from tests.api.test_logprobs import ids_of, scores


def generate(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/generate", json={"text": "hi", **body})


@pytest.fixture(autouse=True)
def says_ab(server: FakeServer) -> None:
    """A rank that says a and b, and stops by an id."""

    def script(control: FakeControl, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        control.row(envelope.id, "a", None, prompt=envelope.tokens, done=1, ids=pack_ids([65]))
        control.row(envelope.id, "b", FinishReason("stop", 66), prompt=envelope.tokens, done=2, ids=pack_ids([66]))

    server.control.script = script


def test_text_in_text_out(server: FakeServer, http: httpx.Client) -> None:
    answer = generate(http, rid="mine").json()
    meta = answer.pop("meta_info")
    assert answer == {"text": "ab", "output_ids": [65, 66]}
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine", "finish_reason": {"type": "stop", "matched": 66}, "prompt_tokens": 2, "completion_tokens": 2,
        "cached_tokens": 0, "dp_rank": 0,
    }  # fmt: skip
    assert server.control.generated[0][1].sampling_params.max_new_tokens == 128


def test_sampling_parameters_reach_the_rank(server: FakeServer, http: httpx.Client) -> None:
    params = {
        "max_new_tokens": 7, "min_new_tokens": 1, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125,
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5, "sampling_seed": 9,
        "stop": ["x"], "stop_token_ids": [5], "ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True,
        "logit_bias": {"7": -1.5},
    }  # fmt: skip
    assert generate(http, input_ids=[1, 2, 3], text=None, sampling_params=params, priority=2).status_code == 200
    ((envelope, body),) = server.control.generated
    sent = body.sampling_params
    assert unpack_ids(body.input_ids) == [1, 2, 3]
    assert (sent.max_new_tokens, sent.min_new_tokens, sent.temperature, sent.top_p, sent.top_k) == (7, 1, 0.5, 0.25, 3)
    assert (sent.frequency_penalty, sent.presence_penalty, sent.repetition_penalty, sent.seed) == (0.5, -0.5, 1.5, 9)
    assert (sent.min_p, sent.stop_token_ids, sent.ignore_eos, sent.logit_bias) == (0.125, [5], True, {7: -1.5})
    text = decode_text_ext(envelope.ext(Ext.TEXT) or b"")
    assert (text.stops, text.skip_special_tokens, text.no_stop_trim, text.ids) == (("x",), False, True, True)
    assert body.priority == 2


def test_without_a_limit_the_context_decides(server: FakeServer, http: httpx.Client) -> None:
    generate(http, sampling_params={"max_new_tokens": None})
    assert server.control.generated[0][1].sampling_params.max_new_tokens == 998


def test_every_event_has_all_so_far(http: httpx.Client) -> None:
    *chunks, done = events(generate(http, stream=True).content)
    assert done == "[DONE]"
    assert chunks[-1]["text"] == "ab"
    assert chunks[-1]["output_ids"] == [65, 66]
    assert all("ab".startswith(chunk["text"]) for chunk in chunks)
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "stop"


def test_a_list_gets_a_list(server: FakeServer, http: httpx.Client) -> None:
    params: list[dict[str, Any]] = [{"max_new_tokens": 3}, {"max_new_tokens": 4, "n": 2}]
    answers = generate(http, text=["x", "yz"], sampling_params=params, rid=["p", "q"]).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["p", "q", "q"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2, 2]
    assert [body.sampling_params.max_new_tokens for _, body in server.control.generated] == [3, 4, 4]
    assert isinstance(generate(http, text=["x"]).json(), list)
    assert isinstance(generate(http, input_ids=[[1]], text=None).json(), list)
    assert len(generate(http, sampling_params={"n": 3}).json()) == 3
    *chunks, _ = events(generate(http, text=["x", "y"], stream=True).content)
    assert {chunk["index"] for chunk in chunks} == {0, 1}


def test_logprobs(server: FakeServer, http: httpx.Client) -> None:
    server.control.script = scores([("a", ids_of(http, "a"))])
    (a,) = ids_of(http, "a")
    h, i = ids_of(http, "hi")
    meta = generate(
        http, return_logprob=True, logprob_start_len=0, top_logprobs_num=1, token_ids_logprob=[3],
        return_text_in_logprobs=True,
    ).json()["meta_info"]  # fmt: skip
    assert meta["output_token_logprobs"] == [[-1.0, a, "a"]]
    assert meta["output_top_logprobs"] == [[[-1.0, a, "a"]]]
    assert meta["output_token_ids_logprobs"][0][0][:2] == [-8.0, 3]
    assert meta["input_token_logprobs"] == [[None, h, "h"], [-0.5, i, "i"]]
    assert meta["input_top_logprobs"] == [None, [[-0.5, i, "i"]]]
    meta = generate(http, text=["hi", "ho"], return_logprob=[False, True]).json()
    assert "output_token_logprobs" not in meta[0]["meta_info"]
    assert meta[1]["meta_info"]["output_token_logprobs"] == [[-1.0, a, None]]
    assert meta[1]["meta_info"]["input_token_logprobs"] == []


def test_rooms_of_a_batch(server: FakeServer, http: httpx.Client) -> None:
    def rooms() -> list[int | None]:
        found = [body.bootstrap_room for _, body in server.control.generated]
        assert [envelope.ext(Ext.ROOM) for envelope, _ in server.control.generated] == [
            room.to_bytes(8, "little") for room in found if room is not None
        ]
        server.control.generated.clear()
        return found

    generate(http, text=["x", "y"], bootstrap_room=7, sampling_params={"n": 2})
    assert rooms() == [7, 8, 9, 10]
    generate(http, text=["x", "y"], bootstrap_room=7, sampling_params=[{"n": 2}, {}])
    assert rooms() == [7, 8, 9]
    generate(http, text=["x", "y"], bootstrap_room=[7, 3], bootstrap_host=["a", "b"], bootstrap_port=[1, None])
    assert [body.bootstrap_host for _, body in server.control.generated] == ["a", "b"]
    assert rooms() == [7, 3]
    http.post("/v1/completions", json={"model": "tiny", "prompt": ["x", "y"], "bootstrap_room": 7})
    assert rooms() == [7, 8]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": None}, "text"), ({"input_ids": [1]}, "text"), ({"text": []}, "text"), ({"text": ["a", 1]}, "text"),
        ({"text": None, "input_ids": [1, [2]]}, "input_ids"), ({"text": None, "input_ids": [259]}, "input_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"regex": "a"}}, "regex"), ({"sampling_params": [{}, {}]}, "sampling_params"),
        ({"sampling_params": {"logit_bias": {"999": 1}}}, "logit_bias"), ({"rid": ["a", "b"]}, "rid"),
        ({"return_logprob": "x"}, "return_logprob"), ({"top_logprobs_num": 21}, "top_logprobs_num"),
        ({"lora_path": "x"}, "lora_path"), ({"image_data": "x"}, "image_data"),
        ({"bootstrap_room": -1}, "bootstrap_room"),
        ({"bootstrap_room": 2**63 - 1, "sampling_params": {"n": 2}}, "bootstrap_room"),
        ({"data_parallel_rank": 9}, "data_parallel_rank"), ({"return_hidden_states": True}, "return_hidden_states"),
        ({"token_ids_logprob": [[1], [2]]}, "token_ids_logprob"), ({"token_ids_logprob": [-1]}, "token_ids_logprob"),
        ({"token_ids_logprob": [259], "return_logprob": True}, "token_ids_logprob"),
        ({"token_ids_logprob": [1, [2]], "return_logprob": True}, "token_ids_logprob"),
    ],
)  # fmt: skip
def test_what_is_refused_names_its_field(server: FakeServer, http: httpx.Client, body: dict, param: str) -> None:
    response = generate(http, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)
    assert server.control.generated == []
    assert server.page.requests == 0


def test_a_room_is_needed_where_it_chooses_the_rank(own_server: Any) -> None:
    server = own_server({"load_balance_method": "follow_bootstrap_room", "data_parallel_size": 2})
    for path, body in (
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"model": "tiny", "prompt": "a"}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}),
    ):
        response = httpx.post(server.url + path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "bootstrap_room")
        assert httpx.post(server.url + path, json={**body, "bootstrap_room": 3}).status_code == 200
        assert httpx.post(server.url + path, json={**body, "data_parallel_rank": 1}).status_code == 200


def test_what_sglangs_users_ask_about_the_model(http: httpx.Client) -> None:
    info = http.get("/model_info").json()
    assert (info["is_generation"], info["max_model_len"], info["vocab_size"]) == (True, 1000, 259)
    assert http.get("/get_model_info").json() == info
    assert http.get("/get_server_info").json()["model_info"]["name"] == "tiny"
    assert http.get("/ping").status_code == 200
