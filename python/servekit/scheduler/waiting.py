"""The requests that wait for a place in the batch, and who of them is next."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from servekit.config.server_args import SCHEDULE_POLICIES
from servekit.scheduler.request import Request

AGED_S = 30.0
"""Who has waited that long goes before all others whatever the policy, so that nobody starves."""
CONSIDERED = 128
"""Requests that are looked at for a step: ordering thousands would cost more than the order brings."""


class WaitingQueue:
    """Waiting requests, kept by arrival.

    Args:
        policy: fcfs is first come first served; lpm takes the longest prefix in the cache first, priority the highest.
        clock: seconds.
        cached: tokens of a request that are in the prefix cache.

    Attributes:
        tokens: known tokens of all.
    """

    def __init__(self, policy: str, clock: Callable[[], float], cached: Callable[[Request], int]) -> None:
        if policy not in SCHEDULE_POLICIES:
            raise ValueError(f"schedule policy {policy!r} is none of {', '.join(SCHEDULE_POLICIES)}")
        self._policy, self._clock, self._cached = policy, clock, cached
        self._requests: list[Request] = []
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Take in a request, a new one or one that lost its pages."""
        bisect.insort(self._requests, request, key=lambda r: r.arrival)
        self.tokens += len(request.tokens)

    def remove(self, request: Request) -> None:
        """A request waits no longer."""
        at = bisect.bisect_left(self._requests, request.arrival, key=lambda r: r.arrival)
        if self._requests[at] is not request:
            raise RuntimeError(f"request {request.rid} does not wait")
        del self._requests[at]
        self.tokens -= len(request.tokens)

    def aged(self, request: Request) -> bool:
        """Whether a request came so long ago that it goes first."""
        return self._clock() - request.since >= AGED_S

    def candidates(self) -> list[Request]:
        """Those to be looked at now, the next one first."""
        if self._policy == "fcfs":
            return self._requests[:CONSIDERED]
        if self._policy == "priority":
            # All of them: the most urgent one may have come last.
            return self._ordered(self._requests, lambda r: -r.priority)[:CONSIDERED]
        return self._ordered(self._requests[:CONSIDERED], lambda r: -self._cached(r))

    def _ordered(self, requests: list[Request], rank: Callable[[Request], int]) -> list[Request]:
        """By rank, after those that have waited long; in the order of arrival where that is equal."""
        before = self._clock() - AGED_S
        return sorted(requests, key=lambda r: (0, 0) if r.since <= before else (1, rank(r)))
