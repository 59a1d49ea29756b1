"""What a scheduler asks of a model runner: one step, as arrays. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

NO_TOKEN = -1
"""A row that was not to be sampled: its prompt is not complete yet."""
BAD_LOGITS = -2
"""A row whose logits hold NaN or infinity."""


@dataclass(slots=True, frozen=True)
class Penalties:
    """What lowers the logits of tokens that were seen; one entry for each distinct token of each row that asks.

    Attributes:
        rows: index of the sampled row.
        ids: the token; a row has each at most once.
        counts: how often it was generated; 0 for a token that only the prompt has.
        repetition: divides a positive logit and multiplies a negative one.
        presence: is subtracted from the logit of a token that was generated.
        frequency: is subtracted from it for each time.
    """

    rows: Ints
    ids: Ints
    counts: Ints
    repetition: Floats
    presence: Floats
    frequency: Floats


@dataclass(slots=True, frozen=True)
class Biases:
    """What is added to logits: sampled row, token and value of each entry."""

    rows: Ints
    ids: Ints
    values: Floats


@dataclass(slots=True, frozen=True)
class SamplingColumns:
    """How the sampled rows of a plan are drawn; every column has one entry per sampled row.

    Penalties change the logits first, then biases, then what is not allowed is taken out, then comes the temperature.

    Attributes:
        temperature: 0 is greedy.
        top_p, min_p: in [0, 1]; 1 and 0 are off.
        top_k: most candidates; 0 is off.
        seed: u64.
        position: index in its sequence of the token that is drawn; with the seed it determines the draw.
        forbidden: per row the ids that must not be drawn, or None; the whole column is None where no row has any.
        penalties, biases: for the rows that ask, None where no row does.
        allowed: per row a mask of what may be drawn, or None: u32 words, token i is bit i % 32 of word i // 32, which
            is how grammar libraries make them; the whole column is None where no row has any.
    """

    temperature: Floats
    top_p: Floats
    top_k: Ints
    min_p: Floats
    seed: npt.NDArray[np.uint64]
    position: Ints
    forbidden: list[Ints | None] | None = None
    penalties: Penalties | None = None
    biases: Biases | None = None
    allowed: list[npt.NDArray[np.uint32] | None] | None = None


@dataclass(slots=True, frozen=True)
class LogprobColumns:
    """Whose logprobs are wanted; every column has one entry for each such place.

    They are the logarithm of the softmax of the logits as the model made them, before anything changes these.

    Attributes:
        at: where the logits are: index of a sampled row, or, for prompts, of a token of the step.
        top: how many of the likeliest tokens are wanted.
        ids: tokens whose logprobs are wanted whatever is drawn, per place, or None.
        targets: for prompts the token that follows; None stands for the drawn tokens.
    """

    at: Ints
    top: Ints
    ids: list[Ints | None] | None = None
    targets: Ints | None = None


@dataclass(slots=True, frozen=True)
class Plan:
    """One step: for each row, the next tokens of one sequence to compute and where its KV pages are.

    Attributes:
        step: number of the step, from 1.
        ids: [tokens] the rows' new tokens, one row after the other.
        starts: [rows] tokens of the sequence that are in the KV pool already.
        counts: [rows] new tokens, at least 1.
        tables: [rows, width] page numbers in order; unused entries are 0, the padding page.
        sampled: indices of the rows that get a token: those whose known tokens end with this step.
        sampling: columns for the sampled rows.
        logprobs: sampled rows whose logprobs are wanted, or None.
        prompt_logprobs: tokens of prompts for which those of the next token are wanted, or None.
        carried: [2, n] new tokens that the step before is still to draw, None if there are none: indices into `ids`,
            which hold nothing there, and among the sampled rows of that step.
    """

    step: int
    ids: Ints
    starts: Ints
    counts: Ints
    tables: Ints
    sampled: Ints
    sampling: SamplingColumns
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    carried: Ints | None = None


@dataclass(slots=True, frozen=True)
class Logprobs:
    """Answer to `LogprobColumns`, one entry a place.

    Attributes:
        chosen: of the drawn token, or of the target.
        top_values, top_ids: [places, widest `top`], likeliest first; a place reads as many as it asked for.
        given: of the ids that a place named, None where no place did.
    """

    chosen: Floats
    top_values: Floats
    top_ids: Ints
    given: list[Floats] | None = None


@dataclass(slots=True, frozen=True)
class StepResult:
    """What a step brought.

    Attributes:
        tokens: [rows, k] new tokens, `NO_TOKEN` where there is none, `BAD_LOGITS` for a failed row.
        logprobs, prompt_logprobs: what the plan asked for.
    """

    tokens: Ints
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class ModelRunner(Protocol):
    """Computes steps one after the other, as they were launched; their results are collected in that order.

    Attributes:
        info: what it computes with, for logs and `/server_info`.
        ahead: steps that are worth planning and launching while one is computed: 0 where `launch` itself computes.
    """

    info: dict[str, Any]
    ahead: int

    def launch(self, plan: Plan) -> Any:
        """Start a step and return its handle. The plan's arrays must not change afterwards."""

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step."""
