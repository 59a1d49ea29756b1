"""What a worker counts and measures of its requests, in its own slot of the state page: `/metrics` reads it there.

Rows that come to a job are metered one by one by a `Step`. Those of streams whose text goes past the jobs, which are
most, are told in sums by `Meter.past`, once a message.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from servekit._core import StatePage
    from servekit.messages.batches import FinishReason
    from servekit.tokenizer.state import Choice, Job

_ENDS = {"stop": "stopped", "length": "exhausted", "abort": "aborted"}
"""Kinds of ends to the numbers that count them; all others are failures."""

UNKNOWN = -1.0
"""`piece_at` of a choice whose last row did not come to its job."""


class Meter:
    """Counts for one worker.

    Args:
        page: the state page.
        worker: whose slot this is.
    """

    def __init__(self, page: StatePage, worker: int) -> None:
        self._page = page
        self._worker = worker
        self._cache: dict[str, int] = {}

    def count(self, field: str, n: int = 1) -> None:
        """Add to one of the worker's numbers on the state page, see `StatePage.worker_add`."""
        self._page.worker_add(self._worker, field, n)

    def cache(self, counts: Mapping[str, int]) -> None:
        """Where the cache of tokenized prefixes stands by now.

        Args:
            counts: by the names of the worker's numbers.
        """
        for field, now in counts.items():
            if now != (before := self._cache.get(field, 0)):
                self.count(field, now - before)
                self._cache[field] = now

    def past(self, rank: int, generated: int, gaps: Iterable[tuple[float, int]]) -> None:
        """Rows of one message went past their jobs.

        Args:
            rank: which made them, -1 if none did.
            generated: tokens of all of them beyond those of the rows before.
            gaps: seconds since the piece before, and of how many streams that is true.
        """
        if generated and rank >= 0:
            self._page.count_tokens(self._worker, rank, 0, 0, generated)
        for seconds, streams in gaps:
            self._page.observe(self._worker, "gap", seconds, streams)

    def step(self) -> Step:
        """Begin to meter those rows of a message that come to their jobs."""
        return Step(self._page, self._worker)


class Step:
    """The rows of one message, written to the page by `close`.

    Streams that move together had their last piece at one moment, so a run of rows has one gap.
    """

    __slots__ = ("_cached", "_generated", "_now", "_page", "_prompt", "_rank", "_run", "_since", "_worker")

    def __init__(self, page: StatePage, worker: int) -> None:
        self._page = page
        self._worker = worker
        self._now = time.monotonic()
        self._rank = -1
        self._prompt = self._cached = self._generated = 0
        self._since = 0.0
        self._run = 0

    def row(
        self, job: Job, choice: Choice, finish: FinishReason | None, generated: int, queue_s: float | None = None
    ) -> None:
        """A row of a choice whose own numbers are up to date.

        Args:
            finish: the choice's end, if the row brings it.
            generated: tokens beyond those of the rows before.
            queue_s: seconds that the request waited at its rank, if the row says so.
        """
        if choice.dp_rank != self._rank:
            self._write_tokens()
            self._rank = choice.dp_rank
        self._generated += generated
        if choice.piece_at == 0.0:
            self._begin(job, choice, finish, queue_s)
        elif choice.piece_at == self._since:
            self._run += 1
        elif choice.piece_at != UNKNOWN:
            self._write_gaps()
            self._since, self._run = choice.piece_at, 1
        choice.piece_at = self._now

    def end(self, job: Job, finish: FinishReason) -> None:
        """A choice has come to its end, which `job.put` knows by now."""
        self._page.worker_add(self._worker, _ENDS.get(finish.type, "failed"), 1)
        if job.live == 0:
            self._page.observe(self._worker, "end_to_end", self._now - job.began)

    def close(self) -> None:
        """The message has no more rows."""
        self._write_gaps()
        self._write_tokens()

    def _begin(self, job: Job, choice: Choice, finish: FinishReason | None, queue_s: float | None) -> None:
        if finish is not None and finish.type in ("error", "abort"):
            # It may never have begun.
            return
        if choice.index == 0 or job.choices[choice.index - 1].prompt is not choice.prompt:
            # Choices of one prompt follow each other; the first of them counts it.
            self._prompt += choice.prompt_tokens
            self._cached += choice.cached_tokens
        if job.streamed:
            self._page.observe(self._worker, "first_token", self._now - job.began)
        if queue_s is not None:
            self._page.observe(self._worker, "queue", queue_s)

    def _write_gaps(self) -> None:
        if self._run:
            self._page.observe(self._worker, "gap", self._now - self._since, self._run)
            self._run = 0

    def _write_tokens(self) -> None:
        if self._rank >= 0 and (self._generated or self._prompt):
            self._page.count_tokens(self._worker, self._rank, self._prompt, self._cached, self._generated)
        self._prompt = self._cached = self._generated = 0
