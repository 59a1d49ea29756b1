"""Who runs: gives waiting requests slots and pages, and takes these back when they are short."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from servekit.engine.plan import Ints
from servekit.scheduler.config import SchedulerConfig
from servekit.scheduler.memory import KvMemory
from servekit.scheduler.pace import SHORT, Pace
from servekit.scheduler.prefix_cache import common_pages
from servekit.scheduler.request import Request, lease_of
from servekit.scheduler.table import SlotTable
from servekit.scheduler.waiting import WaitingQueue

Piece = tuple[Request, int]
"""A request, and how many more of its known tokens a step computes."""


class RunningBatch:
    """The running requests of a rank, their pages, and the queue of those that wait for both.

    Attributes:
        table: the running requests as arrays.
        memory: the pages.
        waiting: the others.
        pace: how much of long prompts a step takes beside decoding requests.
        prefilling: running requests whose known tokens are not all computed, in the order of their admission.
        retractions: how often a request lost its pages.
    """

    def __init__(self, config: SchedulerConfig, max_tokens: int, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._urgency = config.policy == "priority"
        self.table = SlotTable(config.max_running, max_tokens, config.page)
        self.memory = KvMemory(config.pages, config.page, config.prefix_cache)
        self.waiting = WaitingQueue(config.policy, clock, self._cached)
        self.pace = Pace()
        self.prefilling: list[Request] = []
        self.retractions = 0

    def make_room(self) -> None:
        """Before a step: give every decoding request the page for its next token; retract requests if pages or, for
        more urgent ones, slots are short.
        """
        t = self.table
        while True:
            slots = np.flatnonzero(t.decoding & (t.computed == t.held * t.page))
            if len(slots) <= self.memory.available:
                break
            running = [request for request in t.owners if request is not None]
            # The cheapest to compute again; of equals, the one that came last.
            self._retract(min(running, key=lambda r: (int(t.computed[r.slot]), -r.arrival)))
        if len(slots):
            t.pages[slots, t.held[slots]] = self.memory.take(len(slots))
            t.held[slots] += 1
        if self._urgency and len(self.waiting):
            self._push_out(self.waiting.candidates()[0])

    def decodes(self, most: int) -> Ints:
        """Slots that get a token each in this step.

        With several steps in flight it is a share of all, those who were left out longest, so that each step has some.
        """
        t, flights = self.table, self._config.flights
        if flights == 1:
            return np.flatnonzero(t.decoding)
        slots = np.flatnonzero(t.decoding & (t.pending == 0))
        share = min(most, -(-t.running // flights))
        return np.sort(slots[np.argsort(t.planned[slots], kind="stable")[:share]])

    def pieces(self, most: int) -> list[Piece]:
        """Pieces of prompts for this step, at most so many; admits requests while slots, pages and tokens last."""
        budget, admitting = self._config.max_prefill_tokens, not self.table.full
        order = [*self.prefilling, *(self.waiting.candidates() if admitting else ())]
        if self._urgency:
            order.sort(key=lambda r: (0, 0) if self.waiting.aged(r) else (1, -r.priority))
        pieces: list[Piece] = []
        for request in order:
            if budget <= 0 or len(pieces) >= most:
                break
            if request.slot < 0:
                if not admitting or self._prefix_is_coming(request):
                    continue
                if not self._admit(request):
                    admitting = False
                    continue
            budget -= self._add_piece(request, budget, pieces)
        return pieces

    def advance(self, slots: Ints, counts: Ints, drawing: Ints) -> None:
        """A step was planned, see `SlotTable.advance`; those whose known tokens it completes decode from now on."""
        self.table.advance(slots, counts, drawing)
        if self.prefilling:
            complete = set(drawing.tolist())
            self.prefilling = [r for r in self.prefilling if r.slot not in complete]

    def leave(self, request: Request) -> None:
        """Take a request out of the batch; what it has computed stays in the cache until pages are short."""
        if request in self.prefilling:
            self.prefilling.remove(request)
        computed, lease = int(self.table.computed[request.slot]), lease_of(request)
        pages = self.table.remove(request)
        # What launched steps still write into its pages lies behind its tokens, or comes before anybody reads there.
        self.memory.release(lease, request.tokens, pages, min(computed, len(request.tokens)))
        request.lease = None

    def _retract(self, request: Request) -> None:
        """Put a running request back among the waiting ones, in its place by arrival, with its tokens."""
        self.leave(request)
        request.retractions += 1
        self.retractions += 1
        self.waiting.add(request)

    def _push_out(self, request: Request) -> None:
        """Retract less urgent requests, the least urgent and latest first, until there is room for this one."""
        t = self.table
        while t.full or not self.memory.fits(request.tokens, request.salt, request.usable, t.running):
            # Who came long ago has been pushed out often enough.
            below = [r for r in t.owners if r and r.priority < request.priority and not self.waiting.aged(r)]
            if not below:
                return
            self._retract(min(below, key=lambda r: (r.priority, -r.arrival)))

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a slot and pages; False if there is no room for it."""
        t = self.table
        # A page for each running request stays free, or the next steps would retract what is admitted now.
        found = None if t.full else self.memory.admit(request.tokens, request.salt, request.usable, t.running)
        if found is None:
            return False
        self.waiting.remove(request)
        request.lease, pages = found
        cached = request.lease.shared * t.page
        if request.cached < 0:
            request.waited = self._clock() - request.since
            request.cached = min(cached, request.prompt_tokens)
        t.add(request, pages, cached)
        if request.logprobs is not None:
            request.logprobs.restart()
        self.prefilling.append(request)
        return True

    def _add_piece(self, request: Request, budget: int, pieces: list[Piece]) -> int:
        """Let a request compute as much of what it knows as it may in this step."""
        t, slot = self.table, request.slot
        begin = int(t.computed[slot])
        count = min(int(t.known[slot]) - begin, self._config.chunked_prefill_size, budget)
        if int(t.known[slot] - t.cached[slot]) > SHORT and t.decoding.any():
            count = min(count, self.pace.tokens)
        pieces.append((request, count))
        # Already now: who comes later in this step may use it, for a step stores before it reads.
        tokens = t.tokens[slot, : t.known[slot]]
        self.memory.publish(lease_of(request), tokens, t.pages[slot], begin, begin + count)
        return count

    def _prefix_is_coming(self, request: Request) -> bool:
        """Whether a running request will compute more of this one's tokens than the cache has of them now."""
        t, cached = self.table, -1
        if not self._config.prefix_cache:
            return False
        for other in self.prefilling:
            if other.salt != request.salt:
                continue
            theirs = t.tokens[other.slot, : t.known[other.slot]]
            common = common_pages(theirs, request.tokens[: request.usable], t.page) * t.page
            if common and cached < 0:
                cached = self._cached(request)
            if common and common > cached:
                return True
        return False

    def _cached(self, request: Request) -> int:
        """Tokens of a waiting request that it would find in the cache."""
        usable = request.usable // self.table.page * self.table.page
        return self.memory.cache.matched(request.salt, request.tokens[:usable])
