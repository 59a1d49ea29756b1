"""One request on a rank, and the check of what comes in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from servekit.engine.plan import Floats, Ints
from servekit.messages.requests import SamplingParams, TokenizedGenerateReqInput
from servekit.scheduler.logprobs import MAX_GIVEN, MAX_TOP, LogprobState
from servekit.scheduler.memory import Lease
from servekit.scheduler.penalties import SeenTokens, wants_penalties
from servekit.scheduler.prefix_cache import Tokens

_SEED_MASK = (1 << 64) - 1
_MAX_BIAS = 1e6
"""Beyond it a float32 logit could become infinite."""


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
        tokens: prompt and what was generated before it waited; while it runs, the slot table has them.
        limit: tokens of prompt and output at which it ends with "length".
        min_tokens: tokens of prompt and output before which no end token may be drawn.
        params: as the client asked.
        seed: u64 that determines its draws.
        stop_ids: ids that end it, beside the model's end tokens.
        barred: ids that must not be drawn before `min_tokens`.
        seen: counted tokens, None without penalties.
        biases: ids and what is added to their logits, or None.
        logprobs: what it wants to know of them, None for nothing.
        priority: higher is sooner, where the policy asks for it.
        salt: separates its cached prefixes from those of other salts.
        since: when it came, on the scheduler's clock.
        waited: seconds from then to its first step, None before that.
        slot: its row in the slot table, -1 while it waits.
        lease: its pages, None while it waits.
        cached: tokens that it found in the cache when it first ran, -1 before that.
        retractions: how often it lost its pages.
    """

    rid: int
    arrival: int
    prompt_tokens: int
    tokens: Tokens
    limit: int
    min_tokens: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    barred: Ints
    seen: SeenTokens | None
    biases: tuple[Ints, Floats] | None
    logprobs: LogprobState | None
    priority: int
    salt: str
    since: float = field(default=0.0)
    waited: float | None = field(default=None)
    slot: int = field(default=-1)
    lease: Lease | None = field(default=None)
    cached: int = field(default=-1)
    retractions: int = field(default=0)

    @property
    def usable(self) -> int:
        """How many of its known tokens may come from the cache: the last one is always computed, for its logits."""
        usable = len(self.tokens) - 1
        needed = None if self.logprobs is None else self.logprobs.needed
        return usable if needed is None else min(usable, needed)


def lease_of(request: Request) -> Lease:
    """A running request's pages.

    Raises:
        RuntimeError: it does not run.
    """
    if request.lease is None:
        raise RuntimeError(f"request {request.rid} has no pages")
    return request.lease


def make_request(rid: int, body: Any, arrival: int, limits: Limits) -> Request:
    """Check a request's body; nothing in it may harm others later.

    Raises:
        RequestError: it can't be served here.
    """
    if not isinstance(body, TokenizedGenerateReqInput):
        raise RequestError("the request's body does not fit its kind")
    prompt = read_ids(body.input_ids, limits.vocab_size, "the prompt")
    if not len(prompt):
        raise RequestError("the prompt is empty")
    generated = read_ids(body.resume_output_ids, limits.vocab_size, "resume_output_ids")
    if len(prompt) + len(generated) >= limits.max_tokens:
        raise RequestError(f"the prompt has {len(prompt)} tokens, at most {limits.max_tokens - 1} fit")
    params = body.sampling_params
    if body.lora_id is not None:
        raise RequestError("lora_id: not supported by this engine")
    _check_ranges(params)
    stop_ids = frozenset(params.stop_token_ids)
    if any(not 0 <= i < limits.vocab_size for i in stop_ids):
        raise RequestError(f"stop_token_ids must be ids below {limits.vocab_size}")
    barred = stop_ids if params.ignore_eos else stop_ids | set(limits.end_ids.tolist())
    seed = limits.seed ^ rid if params.seed is None else params.seed
    return Request(
        rid=rid,
        arrival=arrival,
        prompt_tokens=len(prompt),
        tokens=np.concatenate((prompt, generated)).astype(np.int32),
        limit=min(len(prompt) + params.max_new_tokens, limits.max_tokens),
        min_tokens=len(prompt) + params.min_new_tokens,
        params=params,
        seed=seed & _SEED_MASK,
        stop_ids=stop_ids,
        barred=np.array(sorted(barred), dtype=np.int64),
        seen=SeenTokens(prompt, generated, params) if wants_penalties(params) else None,
        biases=_biases(params, limits),
        logprobs=_logprobs(body, limits, len(prompt), resumed=len(generated) > 0),
        priority=body.priority or 0,
        salt=body.cache_salt or "",
    )


def read_ids(data: bytes, vocab_size: int, what: str) -> Ints:
    """Token ids from their little-endian u32 bytes.

    Raises:
        RequestError: they are none, or outside the vocabulary.
    """
    if len(data) % 4:
        raise RequestError(f"{what}: {len(data)} bytes are not whole token ids")
    ids = np.frombuffer(data, "<u4").astype(np.int64)
    if len(ids) and int(ids.max()) >= vocab_size:
        raise RequestError(f"token id {int(ids.max())} is outside the vocabulary of {vocab_size}")
    return ids


def _biases(params: SamplingParams, limits: Limits) -> tuple[Ints, Floats] | None:
    biases = {token: value for token, value in (params.logit_bias or {}).items() if value != 0}
    if not biases:
        return None
    if any(not 0 <= token < limits.vocab_size for token in biases):
        raise RequestError(f"logit_bias must name ids below {limits.vocab_size}")
    # Written so that NaN is refused too.
    if not all(abs(value) <= _MAX_BIAS for value in biases.values()):
        raise RequestError(f"logit_bias must be numbers from {-_MAX_BIAS:.0f} to {_MAX_BIAS:.0f}")
    return np.array(list(biases), np.int64), np.array(list(biases.values()), np.float32)


def _logprobs(
    body: TokenizedGenerateReqInput, limits: Limits, prompt_tokens: int, resumed: bool
) -> LogprobState | None:
    if not body.return_logprob:
        return None
    if not 0 <= body.top_logprobs_num <= MAX_TOP:
        raise RequestError(f"top_logprobs_num must be from 0 to {MAX_TOP}")
    if not -1 <= body.logprob_start_len <= prompt_tokens:
        raise RequestError(f"logprob_start_len must be from -1 to {prompt_tokens}, the length of the prompt")
    ids = body.token_ids_logprob or []
    if len(ids) > MAX_GIVEN:
        raise RequestError(f"token_ids_logprob: {len(ids)} ids are more than {MAX_GIVEN}")
    if any(not 0 <= i < limits.vocab_size for i in ids):
        raise RequestError(f"token_ids_logprob must be ids below {limits.vocab_size}")
    # Of a resumed request those of the prompt went out with its first token.
    start = prompt_tokens if body.logprob_start_len < 0 or resumed else body.logprob_start_len
    return LogprobState(body.top_logprobs_num, np.array(ids, np.int64) if ids else None, start, prompt_tokens)


def _check_ranges(params: SamplingParams) -> None:
    rules = {
        "max_tokens must be at least 1": params.max_new_tokens >= 1,
        "min_tokens must be at least 0": params.min_new_tokens >= 0,
        "temperature must be 0 or more": math.isfinite(params.temperature) and params.temperature >= 0,
        "top_p must be above 0 and at most 1": 0 < params.top_p <= 1,
        "top_k must be -1 or at least 1": params.top_k >= -1,
        "min_p must be from 0 to 1": 0 <= params.min_p <= 1,
        "repetition_penalty must be from 0.01 to 100": 0.01 <= params.repetition_penalty <= 100,
        "presence_penalty must be from -100 to 100": -100 <= params.presence_penalty <= 100,
        "frequency_penalty must be from -100 to 100": -100 <= params.frequency_penalty <= 100,
    }
    broken = [rule for rule, kept in rules.items() if not kept]
    if broken:
        raise RequestError(broken[0])
