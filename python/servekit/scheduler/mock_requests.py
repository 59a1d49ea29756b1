"""What a mock rank runs: most requests as columns that cost next to nothing a step, the scripted ones one by one."""

from __future__ import annotations

import struct
import time
from typing import Any

from servekit.messages.batches import BatchTokenIDOutput, FinishReason
from servekit.scheduler.mock_scores import Scores
from servekit.scheduler.mock_script import Rule
from servekit.scheduler.mock_waits import Waits

CYCLE = (260, 282, 253, 284, 418, 355, 314, 327, 911, 1250, 2504, 3410)
"""Ids of frequent words in the demo model's vocabulary."""

_IDS = tuple(struct.pack("<I", token) for token in CYCLE)
_LENGTH = FinishReason("length")


class Request:
    """One request: `done` new tokens of `limit`, `rows` rows so far, the next one due at `due`; it came at `since`."""

    __slots__ = ("done", "due", "limit", "prompt", "rid", "rows", "rule", "scores", "since", "stops")

    def __init__(self, rid: int, prompt: int, limit: int, stops: frozenset[int], rule: Rule | None) -> None:
        """Accept it.

        Args:
            rid: its id.
            prompt: tokens of its prompt.
            limit: most new tokens, at least 1.
            stops: token ids that end it.
            rule: what its script says.
        """
        self.rid, self.prompt, self.limit, self.stops, self.rule = rid, prompt, limit, stops, rule
        self.scores: Scores | None = None
        self.done = self.rows = 0
        self.due = 0.0
        self.since = time.monotonic()


class Rows:
    """Columns of the step that is being made. The detokenizer counts a request's tokens itself."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self.rids: list[int] = []
        self.ids: list[bytes] = []
        self.prompts: list[int] = []
        self.ends: dict[int, FinishReason] = {}
        self.more: dict[str, Any] = {}

    def add(
        self, request: Request, ids: bytes, end: FinishReason | None = None, more: dict[str, Any] | None = None
    ) -> None:
        """One row; `more` is what it has in columns that may be short."""
        for name, value in (more or {}).items():
            column = self.more.setdefault(name, [])
            column += [None] * (len(self.rids) - len(column))
            column.append(value)
        if end is not None:
            self.ends[len(self.rids)] = end
        self.rids.append(request.rid)
        self.ids.append(ids)
        self.prompts.append(request.prompt)

    def batch(self) -> BatchTokenIDOutput:
        """The columns as a message."""
        ends = [self.ends.get(i) for i in range(len(self.rids))] if self.ends else None
        return BatchTokenIDOutput(
            rids=self.rids,
            finished_reasons=ends,
            prompt_tokens=self.prompts,
            decode_ids=self.ids,
            time_stats=self._waits.column(self.rids, self.ends),
            **self.more,
        )


class Cycling:
    """Requests that cycle `CYCLE` until their limit, kept as columns.

    All of them get one token at each step, so what a request has had is told by the step at which it began, and the
    step at which it ends is known from the start: a step looks at no request by itself.
    """

    def __init__(self) -> None:
        self._step = 0
        self._rids: list[int] = []
        self._prompts: list[int] = []
        self._began: list[int] = []
        self._phases: list[int] = []
        self._place: dict[int, int] = {}
        self._ending: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._rids)

    def __contains__(self, rid: int) -> bool:
        return rid in self._place

    @property
    def rids(self) -> list[int]:
        """Ids of all requests."""
        return self._rids

    def add(self, request: Request) -> None:
        """Take a request that has no rule and no stop tokens, and wants no logprobs."""
        self._place[request.rid] = len(self._rids)
        self._rids.append(request.rid)
        self._prompts.append(request.prompt)
        self._began.append(self._step)
        self._phases.append(self._step % len(_IDS))
        self._ending.setdefault(self._step + request.limit, []).append(request.rid)

    def step(self, rows: Rows) -> tuple[int, int]:
        """Give each request a row.

        Returns:
            Tokens that were added, and tokens that the requests which ended no longer hold.
        """
        self._step += 1
        n, before, step = len(self._rids), len(rows.rids), self._step
        rows.rids += self._rids
        rows.prompts += self._prompts
        # What a request gets depends on when it began alone, counted round the cycle.
        given = [_IDS[(step - 1 - phase) % len(_IDS)] for phase in range(len(_IDS))]
        rows.ids += [given[phase] for phase in self._phases]
        ended = [rid for rid in self._ending.pop(step, ()) if rid in self._place]
        for rid in ended:
            rows.ends[before + self._place[rid]] = _LENGTH
        # Only now: a removal moves the last request to another place.
        return n, sum(self._release(rid) for rid in ended)

    def take_out(self, rid: int) -> Request:
        """Remove a request that is aborted, and describe it."""
        place = self._place[rid]
        request = Request(rid, self._prompts[place], 1, frozenset(), None)
        request.done = self._step - self._began[place]
        self._release(rid)
        return request

    def _release(self, rid: int) -> int:
        """Forget a request; tokens that it held."""
        place = self._place.pop(rid)
        held = self._prompts[place] + self._step - self._began[place]
        last = self._rids.pop()
        prompt, began, phase = self._prompts.pop(), self._began.pop(), self._phases.pop()
        if last != rid:
            self._rids[place], self._prompts[place] = last, prompt
            self._began[place], self._phases[place] = began, phase
            self._place[last] = place
        return held
