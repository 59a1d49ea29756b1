"""The tokens that a request has seen, counted as penalties need them."""

from __future__ import annotations

import numpy as np

from servekit.engine.plan import Ints
from servekit.messages.requests import SamplingParams


def wants_penalties(params: SamplingParams) -> bool:
    """Whether any penalty is not neutral."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


class SeenTokens:
    """Distinct tokens of one request and how often each was generated; adding one costs the same at any length.

    Args:
        prompt: its tokens count as seen for the repetition penalty, and only for that.
        generated: tokens that were generated before, of a request that is resumed.
        params: with the penalties.
    """

    def __init__(self, prompt: Ints, generated: Ints, params: SamplingParams) -> None:
        self.params = params
        seen = np.unique(prompt) if params.repetition_penalty != 1 else prompt[:0]
        self._size = len(seen)
        self._ids = np.concatenate((seen, np.zeros(64, np.int64)))
        self._counts = np.zeros(len(self._ids), np.int64)
        self._place = {token: place for place, token in enumerate(seen.tolist())}
        for token in generated.tolist():
            self.add(token)

    @property
    def ids(self) -> Ints:
        """The distinct tokens."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Ints:
        """How often each was generated."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """A token was generated."""
        place = self._place.get(token)
        if place is None:
            if self._size == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            place = self._place[token] = self._size
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1
