"""`/v1/completions` against a scripted control process."""

from __future__ import annotations

import threading

import httpx
import pytest
from servekit.messages.batches import FinishReason
from servekit.messages.envelope import FLAG_STREAM, Ext, decode_text_ext
from servekit.tokenizer.encoding import pack_ids, unpack_ids

from tests.api.fakes import FakeServer, events, says


def complete(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", **body})


def test_the_answer_has_openais_shape(http: httpx.Client) -> None:
    answer = complete(http).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert choice["text"] == "Hello world!"
    assert (choice["index"], choice["logprobs"], choice["finish_reason"], choice["dp_rank"]) == (0, None, "stop", 0)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 3, 5)


def test_the_message_carries_the_request(server: FakeServer, http: httpx.Client) -> None:
    complete(
        http, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=11, max_tokens=9, min_tokens=2, ignore_eos=True,
        stop=["a", "", "bc"], stop_token_ids=[5], skip_special_tokens=False, include_stop_str_in_output=True,
        return_token_ids=True, priority=-3, cache_salt="s", bootstrap_host="h", bootstrap_port=80, bootstrap_room=7,
    )  # fmt: skip
    ((envelope, body),) = server.control.generated
    assert body.rid == envelope.id
    assert unpack_ids(body.input_ids) == http.post("/tokenize", json={"prompt": "hi"}).json()["tokens"]
    assert (envelope.tokens, envelope.rank, envelope.flags & FLAG_STREAM) == (2, -1, 0)
    params = body.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 7, 0.125)
    assert (params.seed, params.max_new_tokens, params.min_new_tokens, params.ignore_eos) == (11, 9, 2, True)
    assert params.stop_token_ids == [5]
    text = envelope.ext(Ext.TEXT)
    assert text is not None
    options = decode_text_ext(text)
    assert options.stops == ("a", "bc")
    assert (options.include_stop, options.skip_special_tokens, options.text, options.ids) == (True, False, True, True)
    assert envelope.ext(Ext.ROOM) == (7).to_bytes(8, "little")
    assert envelope.ext(Ext.CACHE_SALT) == b"s"
    assert (body.priority, body.cache_salt, body.bootstrap_room) == (-3, "s", 7)


def test_sixteen_tokens_unless_told(server: FakeServer, http: httpx.Client) -> None:
    complete(http)
    assert server.control.generated[0][1].sampling_params.max_new_tokens == 16


def test_more_tokens_than_the_context_are_cut_to_it(server: FakeServer, http: httpx.Client) -> None:
    assert complete(http, max_tokens=10**9).status_code == 200
    assert server.control.generated[0][1].sampling_params.max_new_tokens == 998


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([65, 66], [None]), ([[65], [66, 67]], [None, None])],
)
def test_prompts_in_every_form(server: FakeServer, http: httpx.Client, prompt: object, texts: list[str | None]) -> None:
    answer = complete(http, prompt=prompt, echo=True).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    for choice, text in zip(answer["choices"], texts, strict=True):
        assert choice["text"].endswith("Hello world!")
        assert text is None or choice["text"] == text + "Hello world!"
    assert answer["usage"]["prompt_tokens"] == sum(envelope.tokens for envelope, _ in server.control.generated)


def test_choices_of_a_group_are_prompt_by_prompt(server: FakeServer, http: httpx.Client) -> None:
    answer = complete(http, prompt=["a", "b"], n=2, echo=True, seed=5).json()
    assert [choice["text"][0] for choice in answer["choices"]] == ["a", "a", "b", "b"]
    assert answer["usage"]["prompt_tokens"] == 2
    groups = [envelope.ext(Ext.GROUP) for envelope, _ in server.control.generated]
    numbers = [
        [int.from_bytes(g[k : k + s], "little") for k, s in ((0, 8), (8, 4), (12, 4), (16, 8))] for g in groups if g
    ]
    assert len({group for group, *_ in numbers}) == 1
    assert [rest for _, *rest in numbers] == [[0, 4, 0], [1, 4, 0], [2, 4, 1], [3, 4, 1]]
    seeds = [body.sampling_params.seed for _, body in server.control.generated]
    assert seeds[0] == 5
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


def test_unseeded_choices_draw_their_own(server: FakeServer, http: httpx.Client) -> None:
    complete(http, n=3)
    assert len({body.sampling_params.seed for _, body in server.control.generated}) == 3


def test_zero_tokens_are_answered_here(server: FakeServer, http: httpx.Client) -> None:
    answer = complete(http, max_tokens=0, echo=True).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("hi", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert server.control.generated == []
    stream = events(complete(http, max_tokens=0, stream=True).content)
    assert stream[-1] == "[DONE]"
    assert stream[-2]["choices"][0]["finish_reason"] == "length"


def test_streamed_and_whole_are_the_same(http: httpx.Client) -> None:
    whole = complete(http, echo=True).json()
    response = complete(http, echo=True, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(response.content)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in [*chunks, usage]}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]


def test_usage_in_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _usage, _done = events(complete(http, stream=True, stream_options=options).content)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_no_usage_unless_asked(http: httpx.Client) -> None:
    assert all("usage" not in chunk for chunk in events(complete(http, stream=True).content)[:-1])


def test_framing_in_the_text_is_harmless(server: FakeServer, http: httpx.Client) -> None:
    nasty = 'a\n\ndata: [DONE]\r\n"\\\u2028\u2029\u0085\x00\x7f é😀'
    server.control.script = says(nasty, nasty)
    response = complete(http, stream=True, prompt=nasty, echo=True)
    *chunks, done = events(response.content)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == nasty * 3
    assert len(response.text.splitlines()) == len(response.content.splitlines())


def test_token_ids_when_asked(server: FakeServer, http: httpx.Client) -> None:
    def script(control, envelope, body) -> None:
        control.row(envelope.id, "x", None, prompt=2, done=1, ids=pack_ids([7]))
        control.row(envelope.id, "y", FinishReason("stop", 9), prompt=2, done=3, ids=pack_ids([8, 9]))

    server.control.script = script
    prompt_ids = http.post("/tokenize", json={"prompt": "hi"}).json()["tokens"]
    choice = complete(http, return_token_ids=True).json()["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"], choice["stop_reason"]) == ([7, 8, 9], prompt_ids, 9)
    *chunks, _ = events(complete(http, return_token_ids=True, stream=True).content)
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == [7, 8, 9]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt_ids


@pytest.mark.parametrize(
    "named", [{"data_parallel_rank": 1}, {"headers": "1"}, {"data_parallel_rank": 1, "headers": "1"}]
)
def test_a_rank_can_be_named(own_server, named: dict[str, object]) -> None:
    server = own_server({"data_parallel_size": 2})
    headers = {"X-Data-Parallel-Rank": named.pop("headers")} if "headers" in named else {}
    body = {"model": "tiny", "prompt": "hi", **named}
    assert httpx.post(server.url + "/v1/completions", json=body, headers=headers).status_code == 200
    assert server.control.generated[0][0].rank == 1
    assert server.control.generated[0][1].data_parallel_rank == 1


@pytest.mark.parametrize("value", ["", "abc", "1.5", "-1", "99", "0,0", "1"])
def test_bad_rank_headers(http: httpx.Client, value: str) -> None:
    headers = {"X-Data-Parallel-Rank": value}
    response = http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"}, headers=headers)
    assert response.status_code == 400
    assert "data_parallel_rank" in response.json()["error"]["param"]


def test_the_models_defaults_fill_what_is_left_open(own_server) -> None:
    server = own_server(model={"default_sampling": {"temperature": 0.25, "top_k": 3}})
    for more in ({}, {"temperature": 1}):
        httpx.post(server.url + "/v1/completions", json={"model": "tiny", "prompt": "hi", **more})
    first, second = (body.sampling_params for _, body in server.control.generated)
    assert (first.temperature, first.top_k, first.top_p) == (0.25, 3, 1.0)
    assert (second.temperature, second.top_k) == (1.0, 3)


def test_a_server_seed_makes_runs_repeat(own_server) -> None:
    seeds = []
    for _ in range(2):
        server = own_server({"seed": 3})
        httpx.post(server.url + "/v1/completions", json={"model": "tiny", "prompt": "hi", "n": 2})
        seeds.append([body.sampling_params.seed for _, body in server.control.generated])
    assert seeds[0] == seeds[1]


def test_long_echoes_are_no_work_for_the_event_loop(
    server: FakeServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def decode(ids: list[int], skip: bool) -> str:
        threads.append(threading.current_thread())
        return "long"

    monkeypatch.setattr(server.worker.manager.encoder, "decode", decode)
    assert complete(http, prompt=[1] * 100_000, echo=True).status_code == 400
    assert not threads, "a prompt that does not fit is refused first"
    assert complete(http, prompt=[[1] * 50] * 1000, echo=True, max_tokens=0).status_code == 200
    assert len(threads) == 1000
    assert server.thread not in threads
