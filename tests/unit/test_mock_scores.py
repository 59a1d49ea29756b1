"""The mock rank's made-up logprobs."""

from __future__ import annotations

import math

import msgspec
from servekit.messages.requests import SamplingParams, TokenizedGenerateReqInput
from servekit.scheduler.mock_scores import Scores
from servekit.tokenizer.encoding import pack_ids, unpack_floats, unpack_ids

BODY = TokenizedGenerateReqInput(1, pack_ids([7, 8, 9]), SamplingParams(5), return_logprob=True)


def test_there_is_never_more_probability_than_there_is() -> None:
    scores = Scores(msgspec.structs.replace(BODY, top_logprobs_num=20), 100)
    for token in range(100):
        (values,) = scores.columns([token])["output_top_logprobs_val"]
        found = unpack_floats(values)
        assert found == sorted(found, reverse=True)
        assert sum(map(math.exp, found)) < 1


def test_the_chosen_token_is_the_likeliest_and_named_ones_agree_with_the_top() -> None:
    scores = Scores(msgspec.structs.replace(BODY, top_logprobs_num=3, token_ids_logprob=[5, 6, 50]), 100)
    row = scores.columns([5, 99])
    assert unpack_ids(row["output_token_logprobs_idx"]) == [5, 99]
    tops = [
        dict(zip(unpack_ids(ids), unpack_floats(values), strict=True))
        for ids, values in zip(row["output_top_logprobs_idx"], row["output_top_logprobs_val"], strict=True)
    ]
    assert [list(top) for top in tops] == [[5, 6, 7], [99, 0, 1]]
    assert [top[token] for top, token in zip(tops, (5, 99), strict=True)] == unpack_floats(
        row["output_token_logprobs_val"]
    )
    named = unpack_floats(row["output_token_ids_logprobs_val"][0])
    assert named[:2] == [tops[0][5], tops[0][6]]
    assert named[2] < -20


def test_the_prompt_comes_once_and_begins_with_nothing() -> None:
    scores = Scores(msgspec.structs.replace(BODY, logprob_start_len=0, top_logprobs_num=1), 100)
    assert "input_token_logprobs_val" not in scores.columns([])
    row = scores.columns([1])
    first, *rest = unpack_floats(row["input_token_logprobs_val"])
    assert math.isnan(first)
    assert len(rest) == 2
    assert row["input_top_logprobs_val"][0] == b""
    assert "input_token_logprobs_val" not in scores.columns([1])
    later = Scores(msgspec.structs.replace(BODY, logprob_start_len=2), 100).columns([1])
    assert unpack_ids(later["input_token_logprobs_idx"]) == [9]
    assert "input_token_logprobs_val" not in Scores(BODY, 100).columns([1])
