"""A runner without a model: random tokens at once, to see what the scheduler itself costs. Needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from servekit.engine.plan import NO_TOKEN, Ints, Plan
from servekit.engine.randomness import draw_keys


class DummyRunner:
    """Draws every token evenly from the vocabulary, as a function of (seed, position)."""

    def __init__(self, vocab_size: int) -> None:
        self.info: dict[str, Any] = {"device": "none", "dtype": "none", "linear": "none", "load_seconds": 0.0}
        self._vocab_size = vocab_size

    def launch(self, plan: Plan) -> Ints:
        """Draw the step's tokens."""
        out = np.full((len(plan.counts), 1), NO_TOKEN, np.int64)
        keys = draw_keys(plan.sampling.seed, plan.sampling.position)[0].view(np.uint32)
        out[plan.sampled, 0] = keys % self._vocab_size
        return out

    def collect(self, handle: Ints) -> Ints:
        """Tokens of a launched step, [rows, 1]."""
        return handle
