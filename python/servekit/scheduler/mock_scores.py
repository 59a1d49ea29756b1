"""Made-up logprobs of the mock rank: the same for the same tokens, and never more probability than there is."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from servekit.messages.requests import TokenizedGenerateReqInput

_OTHERS = 20
"""Tokens after the chosen one, in the vocabulary's order, that are the next likely ones."""


class Scores:
    """What one request wants to know, and the columns that tell it."""

    def __init__(self, body: TokenizedGenerateReqInput, vocab_size: int) -> None:
        """Keep what is asked; `return_logprob` is set."""
        self._vocab_size = vocab_size
        self._top = body.top_logprobs_num
        self._ids = body.token_ids_logprob
        ids: list[int] = memoryview(body.input_ids).cast("I").tolist()
        self._prompt = ids[body.logprob_start_len :] if body.logprob_start_len >= 0 else []
        self._first_is_blank = body.logprob_start_len == 0

    def columns(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Columns of a row with these new tokens; the prompt's come along with the first."""
        columns = self._side("output", tokens, blank=False)
        if self._prompt and tokens:
            columns |= self._side("input", self._prompt, blank=self._first_is_blank)
            self._prompt = []
        return columns

    def _side(self, side: str, tokens: Sequence[int], blank: bool) -> dict[str, Any]:
        values = [_chosen(token) for token in tokens]
        if blank:
            values[0] = math.nan
        columns: dict[str, Any] = {
            f"{side}_token_logprobs_val": _floats(values),
            f"{side}_token_logprobs_idx": _ids(tokens),
        }
        if self._top:
            self._lists(columns, f"{side}_top_logprobs", [self._likeliest(token) for token in tokens], blank)
        if self._ids is not None:
            self._lists(columns, f"{side}_token_ids_logprobs", [self._named(token) for token in tokens], blank)
        return columns

    def _lists(self, columns: dict[str, Any], name: str, rows: list[list[tuple[int, float]]], blank: bool) -> None:
        if blank:
            rows[0] = []
        columns[f"{name}_val"] = [_floats([value for _, value in row]) for row in rows]
        columns[f"{name}_idx"] = [_ids([token for token, _ in row]) for row in rows]

    def _likeliest(self, token: int) -> list[tuple[int, float]]:
        others = [((token + i) % self._vocab_size, _other(i)) for i in range(1, self._top)]
        return [(token, _chosen(token)), *others]

    def _named(self, token: int) -> list[tuple[int, float]]:
        return [(each, self._value(token, each)) for each in self._ids or ()]

    def _value(self, token: int, other: int) -> float:
        distance = (other - token) % self._vocab_size
        if distance == 0:
            return _chosen(token)
        return _other(distance) if distance <= _OTHERS else -100.0


def _chosen(token: int) -> float:
    return -(1 + token % 7) / 8


def _other(place: int) -> float:
    # The sum of all of them stays below what the likeliest chosen token leaves.
    return -4 - place / 2


def _floats(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _ids(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)
