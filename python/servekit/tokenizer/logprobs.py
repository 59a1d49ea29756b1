"""Logprobs of a choice as they come in, and what each token adds to the text by itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from servekit.messages.batches import BatchStrOutput, BatchTokenIDOutput
from servekit.tokenizer.encoding import unpack_floats, unpack_ids

log = logging.getLogger(__name__)


class LogprobOptions(msgspec.Struct, frozen=True):
    """Which logprobs a client wants, besides those of the new tokens.

    Attributes:
        top: likeliest tokens to name at each position.
        start: prompt tokens from this position on are wanted too, -1 for none.
        ids: tokens whose logprobs are wanted at each position.
    """

    top: int = 0
    start: int = -1
    ids: list[int] | None = None


class Score(NamedTuple):
    """One token's logprob; None for a token that nothing stands before.

    Attributes:
        id: the token.
        logprob: natural logarithm.
        top: likeliest tokens at its place with their logprobs, the likeliest first.
        others: tokens that the client named, with their logprobs.
    """

    id: int
    logprob: float | None
    top: list[tuple[int, float]]
    others: list[tuple[int, float]]


class Logprobs:
    """Logprobs of one choice.

    Args:
        prompt_only: new tokens are not for the client.

    Attributes:
        prompt: of the prompt's tokens, once they are there.
        total: sum over the new tokens.
    """

    __slots__ = ("_new", "_prompt_only", "prompt", "total")

    def __init__(self, prompt_only: bool = False) -> None:
        self.prompt: list[Score] = []
        self.total = 0.0
        self._new: list[Score] = []
        self._prompt_only = prompt_only

    def put(self, batch: BatchStrOutput | BatchTokenIDOutput, row: int) -> bool:
        """Take in a row; False if its columns do not fit together."""
        try:
            self._put(batch, row)
        except ValueError as error:
            log.error("a row's logprobs do not fit together: %s", error)
            return False
        return True

    def _put(self, batch: BatchStrOutput | BatchTokenIDOutput, row: int) -> None:
        self.prompt += _scores(
            batch.input_token_logprobs_val, batch.input_token_logprobs_idx,
            batch.input_top_logprobs_val, batch.input_top_logprobs_idx,
            batch.input_token_ids_logprobs_val, batch.input_token_ids_logprobs_idx, row,
        )  # fmt: skip
        if self._prompt_only:
            return
        new = _scores(
            batch.output_token_logprobs_val, batch.output_token_logprobs_idx,
            batch.output_top_logprobs_val, batch.output_top_logprobs_idx,
            batch.output_token_ids_logprobs_val, batch.output_token_ids_logprobs_idx, row,
        )  # fmt: skip
        self.total += sum(score.logprob or 0.0 for score in new)
        self._new += new

    @property
    def waits(self) -> bool:
        """Whether there are new ones that nobody has taken."""
        return bool(self._new)

    def take(self) -> list[Score]:
        """Those of the new tokens since the last call."""
        new, self._new = self._new, []
        return new


def _scores(
    values: Sequence[bytes | None] | None,
    ids: Sequence[bytes | None] | None,
    top_values: Sequence[list[bytes] | None] | None,
    top_ids: Sequence[list[bytes] | None] | None,
    other_values: Sequence[list[bytes] | None] | None,
    other_ids: Sequence[list[bytes] | None] | None,
    row: int,
) -> list[Score]:
    found = _at(values, row)
    if not found:
        return []
    chosen = unpack_floats(found)
    n = len(chosen)
    top = _pairs(_at(top_values, row), _at(top_ids, row), n)
    others = _pairs(_at(other_values, row), _at(other_ids, row), n)
    return [
        Score(id_, None if math.isnan(value) else value, *more)
        for id_, value, *more in zip(unpack_ids(_at(ids, row) or b""), chosen, top, others, strict=True)
    ]


def _at(column: Sequence[Any] | None, row: int) -> Any:
    """A row of a column that may be absent or end early."""
    return column[row] if column is not None and row < len(column) else None


def _pairs(values: list[bytes] | None, ids: list[bytes] | None, n: int) -> list[list[tuple[int, float]]]:
    if values is None or ids is None:
        return [[] for _ in range(n)]
    return [
        list(zip(unpack_ids(of_ids), unpack_floats(of_values), strict=True))
        for of_values, of_ids in zip(values, ids, strict=True)
    ]
