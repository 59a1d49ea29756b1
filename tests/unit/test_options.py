"""What becomes of what a client says about generation."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from servekit.config import ModelInfo
from servekit.tokenizer import options as opt
from servekit.tokenizer.refusal import Refusal


def options(**fields: Any) -> opt.GenerationOptions:
    return msgspec.convert(fields, opt.GenerationOptions)


def params(defaults: dict[str, float] | None = None, **fields: Any) -> Any:
    model = ModelInfo(
        path="", format="folder", name="m", architecture="x", max_model_len=100, vocab_size=50, tokenizer_file="",
        chat_template=None, bos_token=None, eos_token=None, bos_id=None, add_bos=False, end_ids=[],
        default_sampling=defaults or {},
    )  # fmt: skip
    return opt.sampling_params(options(**fields), 10, model, 1)


def test_openais_defaults() -> None:
    made = params()
    assert (made.temperature, made.top_p, made.top_k, made.min_p, made.seed) == (1.0, 1.0, -1, 0.0, 1)
    assert (made.max_new_tokens, made.min_new_tokens, made.stop_token_ids, made.ignore_eos) == (10, 0, [], False)
    assert (made.presence_penalty, made.frequency_penalty, made.repetition_penalty) == (0.0, 0.0, 1.0)
    assert made.logit_bias is None


def test_the_client_goes_before_the_model() -> None:
    defaults = {"temperature": 0.3, "top_p": 0.4, "top_k": 5, "min_p": 0.6}
    made = params(defaults)
    assert (made.temperature, made.top_p, made.top_k, made.min_p) == (0.3, 0.4, 5, 0.6)
    made = params(defaults, temperature=0, top_p=1, top_k=-1, min_p=0)
    assert (made.temperature, made.top_p, made.top_k, made.min_p) == (0, 1, -1, 0)


def test_penalties_and_biases_are_handed_on() -> None:
    made = params(presence_penalty=2, frequency_penalty=-2, repetition_penalty=1.25, logit_bias={"49": -100, "0": 0.5})
    assert (made.presence_penalty, made.frequency_penalty, made.repetition_penalty) == (2, -2, 1.25)
    assert made.logit_bias == {49: -100, 0: 0.5}
    assert params(logit_bias={}).logit_bias is None
    assert params({"repetition_penalty": 1.5}).repetition_penalty == 1.5
    assert params({"repetition_penalty": 1.5}, repetition_penalty=1).repetition_penalty == 1


@pytest.mark.parametrize("fields", [{"logit_bias": {"50": 1}}, {"stop_token_ids": [3, 50]}])
def test_ids_outside_the_vocabulary_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        params(**fields)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(("given", "used"), [(0, -1), (-1, -1), (1, 1), (10**18, 2**31 - 1)])
def test_top_k(given: int, used: int) -> None:
    assert params(top_k=given).top_k == used


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ("", ()), ([], ()), (["", ""], ()), ("a", ("a",)), (["a", "", "b"], ("a", "b"))]
)
def test_empty_stops_are_no_stops(stop: Any, strings: tuple[str, ...]) -> None:
    assert opt.stop_strings(options(stop=stop)) == strings
    assert opt.text_options(options(stop=stop)).stops == strings


def test_seeds_are_drawn_from_seed_and_choice() -> None:
    entropy = random.Random(1)
    seeds = [opt.choice_seed(7, i, entropy) for i in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert seeds == [opt.choice_seed(7, i, entropy) for i in range(100)]
    assert set(seeds[1:]).isdisjoint(opt.choice_seed(8, i, entropy) for i in range(1, 100))
    for seed in (-1, -(2**63), 2**63, 2**70):
        assert 0 <= opt.choice_seed(seed, 0, entropy) < 2**63
    assert opt.choice_seed(None, 0, entropy) != opt.choice_seed(None, 0, entropy)


@pytest.mark.parametrize(("wanted", "allowed"), [(None, 60), (5, 5), (0, 0), (10**12, 60)])
def test_the_context_bounds_what_is_generated(wanted: int | None, allowed: int) -> None:
    assert opt.token_limit(wanted, 40, 100) == allowed


@pytest.mark.parametrize("prompt", [100, 250])
def test_a_prompt_that_fills_the_context_is_refused(prompt: int) -> None:
    with pytest.raises(Refusal) as caught:
        opt.token_limit(1, prompt, 100)
    assert caught.value.code == "context_length_exceeded"
    assert opt.token_limit(None, 99, 100) == 1


def test_more_tokens_at_least_than_at_most() -> None:
    assert params(min_tokens=10).min_new_tokens == 10
    with pytest.raises(Refusal):
        params(min_tokens=11)


@pytest.mark.parametrize(
    ("field", "headers", "rank"), [(None, [], -1), (1, [], 1), (None, ["1"], 1), (1, [" 1 "], 1), (None, ["0", "0"], 0)]
)
def test_named_ranks(field: int | None, headers: list[str], rank: int) -> None:
    assert opt.named_rank(options(data_parallel_rank=field), headers, 2) == rank


@pytest.mark.parametrize(
    ("field", "headers"),
    [(2, []), (None, ["2"]), (0, ["1"]), (None, ["0", "1"]), (None, [""]), (None, ["x"]), (None, ["-1"]),
     (None, ["1.0"]),
     (None, ["٣"]), (None, ["9" * 30]), (10**30, [])],
)  # fmt: skip
def test_badly_named_ranks(field: int | None, headers: list[str]) -> None:
    with pytest.raises(Refusal) as caught:
        opt.named_rank(options(data_parallel_rank=field), headers, 2)
    assert caught.value.status == 400


def test_every_unbuilt_field_is_refused_unless_neutral() -> None:
    for field in opt.Unbuilt.__struct_fields__:
        opt.check(opt.GenerationOptions(**{field: None}))
        with pytest.raises(Refusal) as caught:
            opt.check(opt.GenerationOptions(**{field: 3}))
        assert caught.value.param == field
