"""Rows on their way to the detokenizer, gathered into the columns of one message."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from servekit.engine.plan import Ints
from servekit.messages.batches import QUEUE_TIME, BatchTokenIDOutput, FinishReason
from servekit.scheduler.logprobs import Columns


class Outputs:
    """Gathers rows until `take`; within a batch a request has its tokens first and its end last."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._rids: list[int] = []
        self._reasons: list[FinishReason | None] = []
        self._prompt: list[int] = []
        self._completion: list[int] = []
        self._cached: list[int] = []
        self._retractions: list[int] = []
        self._ids: list[bytes] = []
        self._extra: dict[str, dict[int, Any]] = {}
        self._waits: dict[int, float | None] = {}

    def step(
        self,
        rids: npt.NDArray[np.uint64],
        new: Ints,
        prompt: Ints,
        completion: Ints,
        cached: Ints,
        retractions: Ints,
        reasons: list[FinishReason | None] | None,
        extra: dict[int, Columns],
        waits: dict[int, float | None],
    ) -> None:
        """Add one new token for each of some requests; all arguments are columns over them.

        Args:
            extra: further columns of single requests, by their index among these.
            waits: seconds that single requests waited for their first step, by their index among these.
        """
        first = len(self._rids)
        self._waits |= {first + row: seconds for row, seconds in waits.items()}
        for row, columns in extra.items():
            for name, value in columns.items():
                self._extra.setdefault(name, {})[first + row] = value
        raw = new.astype("<u4").tobytes()
        self._rids += rids.tolist()
        self._reasons += reasons if reasons is not None else [None] * len(new)
        self._prompt += prompt.tolist()
        self._completion += completion.tolist()
        self._cached += cached.tolist()
        self._retractions += retractions.tolist()
        self._ids += [raw[at : at + 4] for at in range(0, len(raw), 4)]

    def close(
        self, rid: int, reason: FinishReason, prompt: int, completion: int, cached: int, retractions: int
    ) -> None:
        """Add a finished row without tokens."""
        self._rids.append(rid)
        self._reasons.append(reason)
        self._prompt.append(prompt)
        self._completion.append(completion)
        self._cached.append(cached)
        self._retractions.append(retractions)
        self._ids.append(b"")

    def take(self) -> BatchTokenIDOutput | None:
        """The rows as one message, or None if there are none. Columns that would say nothing are absent."""
        if not self._rids:
            return None
        batch = BatchTokenIDOutput(
            rids=self._rids,
            finished_reasons=self._reasons if any(self._reasons) else None,
            prompt_tokens=self._prompt,
            completion_tokens=self._completion,
            cached_tokens=self._cached if any(self._cached) else None,
            retraction_counts=self._retractions if any(self._retractions) else None,
            decode_ids=self._ids,
        )
        for name, rows in self._extra.items():
            setattr(batch, name, [rows.get(row) for row in range(max(rows) + 1)])
        if self._waits:
            batch.time_stats = {QUEUE_TIME: [self._waits.get(row) for row in range(len(self._rids))]}
        self._clear()
        return batch
