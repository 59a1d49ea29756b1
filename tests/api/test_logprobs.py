"""Logprobs on the OpenAI routes against a scripted control process. The tokenizer has one token a byte."""

from __future__ import annotations

import math
import struct
from typing import Any

import httpx
import pytest
from servekit.messages.batches import FinishReason
from servekit.messages.envelope import Envelope
from servekit.messages.requests import TokenizedGenerateReqInput
from servekit.tokenizer.encoding import pack_ids, unpack_ids

from tests.api.fakes import END, FakeControl, FakeServer, Script, events

HI = [{"role": "user", "content": "hi"}]


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def columns(side: str, ids: list[int], first: float, top: int, named: list[int] | None) -> dict[str, Any]:
    """Logprobs of tokens: `first`, then each half of the one before; neighbours and named ones at -8."""
    values = [first / 2**i for i in range(len(ids))]
    blank = [math.isnan(first)] + [False] * len(ids)
    found: dict[str, Any] = {f"{side}_token_logprobs_val": floats(*values), f"{side}_token_logprobs_idx": pack_ids(ids)}
    if blank[0] and len(ids) > 1:
        found[f"{side}_token_logprobs_val"] = floats(math.nan, *[-0.5 / 2**i for i in range(len(ids) - 1)])
        values = [math.nan, *[-0.5 / 2**i for i in range(len(ids) - 1)]]
    if top:
        rows = [[(ids[i], values[i]), *[((ids[i] + k) % 256, -8.0) for k in range(1, top)]] for i in range(len(ids))]
        rows = [[] if empty else row for empty, row in zip(blank, rows, strict=False)]
        found[f"{side}_top_logprobs_val"] = [floats(*[value for _, value in row]) for row in rows]
        found[f"{side}_top_logprobs_idx"] = [pack_ids([token for token, _ in row]) for row in rows]
    if named is not None:
        found[f"{side}_token_ids_logprobs_val"] = [
            b"" if empty else floats(*[-8.0] * len(named)) for empty in blank[:-1]
        ]
        found[f"{side}_token_ids_logprobs_idx"] = [b"" if empty else pack_ids(named) for empty in blank[:-1]]
    return found


def scores(pieces: list[tuple[str, list[int]]], end: FinishReason | None = None) -> Script:
    """A rank that says these pieces, each with its ids, and what their logprobs are."""

    def script(control: FakeControl, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        done = 0
        for i, (text, ids) in enumerate(pieces):
            more = columns("output", ids, -1.0, body.top_logprobs_num, body.token_ids_logprob)
            if i == 0 and body.logprob_start_len >= 0:
                prompt = unpack_ids(body.input_ids)[body.logprob_start_len :]
                first = math.nan if body.logprob_start_len == 0 else -0.5
                more |= columns("input", prompt, first, body.top_logprobs_num, body.token_ids_logprob)
            done += len(ids)
            finish = (end or FinishReason("length")) if i == len(pieces) - 1 else None
            control.row(envelope.id, text, finish, prompt=envelope.tokens, done=done, **more)

    return script


def ids_of(http: httpx.Client, text: str) -> list[int]:
    found: list[int] = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return found


def chat(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, **body})


def complete(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", **body})


def test_chat_tells_tokens_bytes_and_alternatives(server: FakeServer, http: httpx.Client) -> None:
    server.control.script = scores([("aé", ids_of(http, "aé"))])
    body = chat(http, logprobs=True, top_logprobs=2, max_tokens=3).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [(entry["bytes"], entry["logprob"]) for entry in content] == [([97], -1.0), ([0xC3], -0.5), ([0xA9], -0.25)]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "aé"
    assert [entry["token"] for entry in content] == ["a", "\ufffd", "\ufffd"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
    sent = server.control.generated[0][1]
    assert (sent.return_logprob, sent.top_logprobs_num, sent.logprob_start_len) == (True, 2, -1)


def test_without_top_logprobs_there_are_none(server: FakeServer, http: httpx.Client) -> None:
    server.control.script = scores([("a", ids_of(http, "a"))])
    content = chat(http, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]]
    assert chat(http, logprobs=False).json()["choices"][0]["logprobs"] is None
    assert server.control.generated[-1][1].return_logprob is False


@pytest.mark.parametrize("ask", [chat, complete])
def test_a_stream_tells_each_token_once(server: FakeServer, http: httpx.Client, ask: Any) -> None:
    pieces = [("ab", ids_of(http, "ab")), ("c", ids_of(http, "c"))]
    server.control.script = scores([*pieces, ("", ids_of(http, END))], FinishReason("stop", 258))
    wanted = True if ask is chat else 0
    whole = ask(http, logprobs=wanted, max_tokens=9).json()["choices"][0]["logprobs"]
    *chunks, done = events(ask(http, logprobs=wanted, max_tokens=9, stream=True).content)
    assert done == "[DONE]"
    streamed = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    for key, values in whole.items():
        if isinstance(values, list):
            assert [each for part in streamed for each in part[key]] == values
    name = "content" if ask is chat else "tokens"
    assert len(whole[name]) == 4, "the end token has a logprob too"


def test_completions_tell_lists_of_one_length(server: FakeServer, http: httpx.Client) -> None:
    server.control.script = scores([("aéb", ids_of(http, "aéb"))])
    found = complete(http, logprobs=2).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "\ufffd", "\ufffd", "b"]
    assert found["token_logprobs"] == [-1.0, -0.5, -0.25, -0.125]
    assert found["text_offset"] == [0, 1, 1, 2], "in characters"
    assert found["top_logprobs"][0] == {"a": -1.0, "b": -8.0}
    assert all(len(top) == 2 for top in found["top_logprobs"]), "tokens that look the same do not hide each other"


def test_an_echo_has_the_prompts_logprobs(server: FakeServer, http: httpx.Client) -> None:
    server.control.script = scores([(" x", ids_of(http, " x"))])
    answer = complete(http, prompt="héy", echo=True, logprobs=1, max_tokens=2).json()
    choice, found = answer["choices"][0], answer["choices"][0]["logprobs"]
    assert choice["text"] == "héy x"
    assert found["token_logprobs"] == [None, -0.5, -0.25, -0.125, -1.0, -0.5]
    assert found["top_logprobs"][0] is None
    assert found["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert "".join(found["tokens"][-3:]) == "y x"
    *chunks, _ = events(complete(http, prompt="héy", echo=True, logprobs=1, max_tokens=2, stream=True).content)
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in chunks] == [[0, 1, 1, 2, 3, 4]]


def test_a_prompt_is_scored_without_new_tokens(server: FakeServer, http: httpx.Client) -> None:
    server.control.script = scores([("never shown", ids_of(http, "n"))])
    answer = complete(http, prompt="hey", echo=True, logprobs=0, max_tokens=0).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("hey", "length", 0)
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.25]
    assert server.control.generated[0][1].sampling_params.max_new_tokens == 1


def test_the_best_of_several_are_shown(server: FakeServer, http: httpx.Client) -> None:
    def script(control: FakeControl, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
        number = len(control.generated)
        value = {1: -3.0, 2: -1.0, 3: -2.0}[number]
        control.row(
            envelope.id, str(number), FinishReason("stop"), prompt=2, done=1,
            output_token_logprobs_val=floats(value), output_token_logprobs_idx=pack_ids([65]),
        )  # fmt: skip

    server.control.script = script
    answer = complete(http, best_of=3, n=2).json()
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [(0, "2", None), (1, "3", None)]
    assert answer["usage"]["completion_tokens"] == 3, "all that was made counts"


def test_minus_infinity_and_columns_that_do_not_fit(server: FakeServer, http: httpx.Client) -> None:
    def script(values: bytes, ids: bytes) -> Script:
        def say(control: FakeControl, envelope: Envelope, body: TokenizedGenerateReqInput) -> None:
            control.row(
                envelope.id, "a", FinishReason("stop"), prompt=2, done=1,
                output_token_logprobs_val=values, output_token_logprobs_idx=ids,
            )  # fmt: skip

        return say

    server.control.script = script(floats(-math.inf), pack_ids([65]))
    assert complete(http, logprobs=0).json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
    for broken in (script(floats(-1.0), pack_ids([65, 66])), script(b"abc", pack_ids([65]))):
        server.control.script = broken
        assert complete(http, logprobs=0).status_code == 500
        assert complete(http).status_code == 200, "only who wants them is concerned"
