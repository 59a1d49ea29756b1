"""A runner without a model: random tokens at once, to see what the scheduler itself costs. Needs no torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from servekit.engine.plan import NO_TOKEN, LogprobColumns, Logprobs, Plan, StepResult
from servekit.engine.randomness import draw_keys


class DummyRunner:
    """Draws every token evenly from the vocabulary, as a function of (seed, position)."""

    ahead = 0

    def __init__(self, vocab_size: int) -> None:
        self.info: dict[str, Any] = {"device": "none", "dtype": "none", "linear": "none", "load_seconds": 0.0}
        self._vocab_size = vocab_size

    def launch(self, plan: Plan) -> StepResult:
        """Draw the step's tokens."""
        out = np.full((len(plan.counts), 1), NO_TOKEN, np.int64)
        keys = draw_keys(plan.sampling.seed, plan.sampling.position)[0].view(np.uint32)
        out[plan.sampled, 0] = keys % self._vocab_size
        return StepResult(out, self._even(plan.logprobs), self._even(plan.prompt_logprobs))

    def collect(self, handle: StepResult) -> StepResult:
        """Tokens of a launched step, [rows, 1], with logprobs that are all alike."""
        return handle

    def _even(self, columns: LogprobColumns | None) -> Logprobs | None:
        if columns is None:
            return None
        each, places = np.float32(-math.log(self._vocab_size)), len(columns.at)
        width = min(int(columns.top.max(initial=0)), self._vocab_size)
        given = None
        if columns.ids is not None:
            given = [np.full(0 if ids is None else len(ids), each, np.float32) for ids in columns.ids]
        return Logprobs(
            np.full(places, each, np.float32),
            np.full((places, width), each, np.float32),
            np.tile(np.arange(width), (places, 1)),
            given,
        )
