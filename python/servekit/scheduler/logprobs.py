"""Which logprobs requests want, and how they become columns of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from servekit.engine.plan import Ints, Logprobs

MAX_TOP = 20
"""Most likeliest tokens that a request may ask for."""
MAX_GIVEN = 1024
"""Most ids whose logprobs a request may ask for."""

Columns = dict[str, Any]
"""Values of one row, by the name of its column in `BatchTokenIDOutput`."""


@dataclass(slots=True)
class _Found:
    """Logprobs of some tokens in a row, as they travel: f32 and u32 bytes."""

    chosen: bytes = b""
    top_values: list[bytes] = field(default_factory=list)
    top_ids: list[bytes] = field(default_factory=list)
    given: list[bytes] = field(default_factory=list)

    def add(self, logprobs: Logprobs, places: range, top: int) -> None:
        """Append what was computed at some places."""
        here = slice(places.start, places.stop)
        self.chosen += logprobs.chosen[here].astype("<f4").tobytes()
        self.top_values += [row.tobytes() for row in logprobs.top_values[here, :top].astype("<f4")]
        self.top_ids += [row.tobytes() for row in logprobs.top_ids[here, :top].astype("<u4")]
        if logprobs.given is not None:
            self.given += [row.astype("<f4").tobytes() for row in logprobs.given[here]]

    def add_first(self) -> None:
        """Append the first token of a sequence: nothing comes before it that could tell of it."""
        self.chosen += np.array([np.nan], "<f4").tobytes()
        for column in (self.top_values, self.top_ids, self.given):
            column.append(b"")


class LogprobState:
    """What one request wants, and what is known of its prompt until that goes out with its first token.

    Args:
        top: how many of the likeliest tokens.
        ids: further tokens, None for none.
        start: first token of the prompt whose logprob is wanted.
        end: one after the last; not above `start` if none is wanted.
    """

    def __init__(self, top: int, ids: Ints | None, start: int, end: int) -> None:
        self.top = top
        self.ids = ids
        self._start, self._end = start, end
        self._prompt = _Found()

    @property
    def needed(self) -> int | None:
        """First token of the sequence that has to be computed even if it is cached, None if that does not matter."""
        return max(self._start - 1, 0) if self._start < self._end else None

    def restart(self) -> None:
        """The sequence is computed from its beginning, for the first time or again."""
        self._prompt = _Found()
        if self._start == 0 < self._end:
            self._prompt.add_first()

    def wanted(self, begin: int, end: int) -> range:
        """Which of the sequence's tokens [begin, end), computed in one step, tell of a prompt token that is wanted."""
        if self._start >= self._end:
            return range(0)
        return range(max(begin, self._start - 1), min(end, self._end - 1))

    def add(self, logprobs: Logprobs, places: range) -> None:
        """Take in the answers for the tokens that `wanted` named, step by step."""
        self._prompt.add(logprobs, places, self.top)

    def row(self, logprobs: Logprobs, place: int, tokens: npt.NDArray[np.int32]) -> Columns:
        """Columns of a row with one new token, the last of `tokens`; those of the prompt come along once.

        Args:
            logprobs: of the step.
            place: the request's place in them.
            tokens: the sequence, with the new token.
        """
        found = _Found()
        found.add(logprobs, range(place, place + 1), self.top)
        columns = self._columns("output", found, tokens[-1:])
        if self._start < self._end:
            columns |= self._columns("input", self._prompt, tokens[self._start : self._end])
            self._start, self._prompt = self._end, _Found()
        return columns

    def _columns(self, side: str, found: _Found, tokens: npt.NDArray[np.int32]) -> Columns:
        columns: Columns = {
            f"{side}_token_logprobs_val": found.chosen,
            f"{side}_token_logprobs_idx": tokens.astype("<u4").tobytes(),
        }
        if self.top:
            columns[f"{side}_top_logprobs_val"] = found.top_values
            columns[f"{side}_top_logprobs_idx"] = found.top_ids
        if self.ids is not None:
            each = self.ids.astype("<u4").tobytes()
            columns[f"{side}_token_ids_logprobs_val"] = found.given
            columns[f"{side}_token_ids_logprobs_idx"] = [each if value else b"" for value in found.given]
        return columns
