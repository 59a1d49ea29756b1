"""One request on a rank, and the check of what comes in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from servekit.engine.plan import Ints
from servekit.messages.requests import SamplingParams, TokenizedGenerateReqInput

_SEED_MASK = (1 << 64) - 1


class RequestError(ValueError):
    """A request that can't be served: one line for the client and an HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True, frozen=True)
class Limits:
    """What a request is held to.

    Attributes:
        vocab_size: ids are below it.
        max_tokens: most tokens of prompt and output together: the context, or the KV pool if that is smaller.
        end_ids: the model's end tokens.
        seed: base for requests that bring no seed.
    """

    vocab_size: int
    max_tokens: int
    end_ids: Ints
    seed: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One accepted request.

    Attributes:
        rid: its id.
        arrival: its place in the order of arrival.
        prompt_tokens: length of its prompt.
        tokens: prompt and, after a retraction, what was generated; while it runs, the slot table has them.
        limit: tokens of prompt and output at which it ends with "length".
        min_tokens: tokens of prompt and output before which no end token may be drawn.
        params: as the client asked.
        seed: u64 that determines its draws.
        stop_ids: ids that end it, beside the model's end tokens.
        barred: ids that must not be drawn before `min_tokens`.
        slot: its row in the slot table, -1 while it waits.
        retractions: how often it lost its pages.
    """

    rid: int
    arrival: int
    prompt_tokens: int
    tokens: Ints
    limit: int
    min_tokens: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    barred: Ints
    slot: int = field(default=-1)
    retractions: int = field(default=0)


def make_request(rid: int, body: Any, arrival: int, limits: Limits) -> Request:
    """Check a request's body; nothing in it may harm others later.

    Raises:
        RequestError: it can't be served here.
    """
    if not isinstance(body, TokenizedGenerateReqInput):
        raise RequestError("the request's body does not fit its kind")
    if len(body.input_ids) % 4:
        raise RequestError("the prompt's bytes are not whole token ids")
    tokens = np.frombuffer(body.input_ids, "<u4").astype(np.int64)
    if not len(tokens):
        raise RequestError("the prompt is empty")
    if int(tokens.max()) >= limits.vocab_size:
        raise RequestError(f"token id {int(tokens.max())} is outside the vocabulary of {limits.vocab_size}")
    if len(tokens) >= limits.max_tokens:
        raise RequestError(f"the prompt has {len(tokens)} tokens, at most {limits.max_tokens - 1} fit")
    params = body.sampling_params
    _check_supported(body, params)
    _check_ranges(params)
    stop_ids = frozenset(params.stop_token_ids)
    if any(not 0 <= i < limits.vocab_size for i in stop_ids):
        raise RequestError(f"stop_token_ids must be ids below {limits.vocab_size}")
    barred = stop_ids if params.ignore_eos else stop_ids | set(limits.end_ids.tolist())
    seed = limits.seed ^ rid if params.seed is None else params.seed
    return Request(
        rid=rid,
        arrival=arrival,
        prompt_tokens=len(tokens),
        tokens=tokens,
        limit=min(len(tokens) + params.max_new_tokens, limits.max_tokens),
        min_tokens=len(tokens) + params.min_new_tokens,
        params=params,
        seed=seed & _SEED_MASK,
        stop_ids=stop_ids,
        barred=np.array(sorted(barred), dtype=np.int64),
    )


def _check_supported(body: TokenizedGenerateReqInput, params: SamplingParams) -> None:
    unsupported = {
        "logprobs": body.return_logprob,
        "lora_id": body.lora_id is not None,
        "frequency_penalty": params.frequency_penalty != 0,
        "presence_penalty": params.presence_penalty != 0,
        "repetition_penalty": params.repetition_penalty != 1,
        "logit_bias": bool(params.logit_bias),
    }
    asked = [name for name, yes in unsupported.items() if yes]
    if asked:
        raise RequestError(f"{', '.join(asked)}: not supported by this engine")


def _check_ranges(params: SamplingParams) -> None:
    rules = {
        "max_tokens must be at least 1": params.max_new_tokens >= 1,
        "min_tokens must be at least 0": params.min_new_tokens >= 0,
        "temperature must be 0 or more": math.isfinite(params.temperature) and params.temperature >= 0,
        "top_p must be above 0 and at most 1": 0 < params.top_p <= 1,
        "top_k must be -1 or at least 1": params.top_k >= -1,
        "min_p must be from 0 to 1": 0 <= params.min_p <= 1,
    }
    broken = [rule for rule, kept in rules.items() if not kept]
    if broken:
        raise RequestError(broken[0])
