"""The running requests as arrays, one row a slot, so that a step costs array operations and not a loop over objects."""

from __future__ import annotations

import numpy as np

from servekit.engine.plan import Ints
from servekit.scheduler.request import Request


class SlotTable:
    """State of up to `slots` running requests.

    Attributes, each an array over slots:
        serial: changes whenever a slot gets another request.
        used, decoding: the slot has a request; the next step computes its newest token, and draws another.
        planned: the last step that was planned with it.
        rid, prompt, limit, min_tokens: of its request.
        known, computed: tokens of prompt and output, with those that launched steps will draw; those whose keys and
            values are in the pool, or will be when these steps are done.
        pending: how many of the known tokens, the last ones, are still to be drawn; their ids are 0.
        drawn_at: where the newest token is among those that the last step draws.
        held: pages it holds.
        tokens: [slots, max_tokens] ids, valid up to `known`.
        pages: [slots, pages of max_tokens] page numbers, 0 from `held` on.
        temperature, top_p, top_k, min_p, seed: how it is sampled.
        ignores_end, has_stops: the model's end tokens don't end it; it has stop ids of its own.
        penalized, biased, tells: it has penalties, biases; its logprobs are wanted.
        retractions: how often its request lost its pages.
        cached: prompt tokens that its request found in the cache.
    """

    def __init__(self, slots: int, max_tokens: int, page: int) -> None:
        self.page = page
        self.owners: list[Request | None] = [None] * slots
        self._free = list(range(slots - 1, -1, -1))
        self.serial, self.prompt, self.limit, self.min_tokens = (np.zeros(slots, np.int64) for _ in range(4))
        self.known, self.computed, self.held = (np.zeros(slots, np.int64) for _ in range(3))
        self.pending, self.drawn_at = (np.zeros(slots, np.int64) for _ in range(2))
        self.top_k, self.retractions, self.cached = (np.zeros(slots, np.int64) for _ in range(3))
        self.used, self.decoding, self.ignores_end, self.has_stops = (np.zeros(slots, np.bool_) for _ in range(4))
        self.penalized, self.biased, self.tells = (np.zeros(slots, np.bool_) for _ in range(3))
        self.planned = np.zeros(slots, np.int64)
        self.rid, self.seed = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
        self.temperature, self.top_p, self.min_p = (np.zeros(slots, np.float32) for _ in range(3))
        # Not touched before it is used, so long contexts cost no memory by themselves.
        self.tokens = np.empty((slots, max_tokens), np.int32)
        self.pages = np.zeros((slots, -(-max_tokens // page)), np.int64)

    @property
    def full(self) -> bool:
        """No slot is free."""
        return not self._free

    @property
    def running(self) -> int:
        """Slots in use."""
        return len(self.owners) - len(self._free)

    def owner(self, slot: int) -> Request:
        """The request in a slot.

        Raises:
            RuntimeError: there is none.
        """
        request = self.owners[slot]
        if request is None:
            raise RuntimeError(f"slot {slot} has no request")
        return request

    def add(self, request: Request, pages: Ints, cached: int) -> None:
        """Give a request a slot.

        Args:
            pages: for all its known tokens.
            cached: tokens at the beginning whose keys and values are there.
        """
        slot = self._free.pop()
        request.slot = slot
        self.owners[slot] = request
        p, known = request.params, len(request.tokens)
        self.serial[slot] += 1
        self.used[slot], self.decoding[slot] = True, False
        self.rid[slot], self.prompt[slot], self.limit[slot] = request.rid, request.prompt_tokens, request.limit
        self.min_tokens[slot], self.known[slot], self.computed[slot] = request.min_tokens, known, cached
        self.tokens[slot, :known] = request.tokens
        self.held[slot] = len(pages)
        self.pages[slot, : len(pages)] = pages
        self.temperature[slot], self.top_p[slot], self.min_p[slot] = p.temperature, p.top_p, p.min_p
        self.top_k[slot], self.seed[slot] = max(p.top_k, 0), request.seed
        self.ignores_end[slot], self.has_stops[slot] = p.ignore_eos, bool(request.stop_ids)
        self.penalized[slot], self.biased[slot] = request.seen is not None, request.biases is not None
        self.tells[slot] = request.logprobs is not None
        self.retractions[slot], self.cached[slot] = request.retractions, request.cached

    def advance(self, slots: Ints, counts: Ints, drawing: Ints) -> None:
        """A step was planned: it computes `counts` tokens of some slots, and draws one for those in `drawing`."""
        self.computed[slots] += counts
        self.tokens[drawing, self.known[drawing]] = 0
        self.known[drawing] += 1
        self.pending[drawing] += 1
        self.drawn_at[drawing] = np.arange(len(drawing))
        # Who will have all its tokens needs no further step, whatever they are.
        self.decoding[drawing] = self.known[drawing] < self.limit[drawing]

    def fill(self, slots: Ints, at: Ints, tokens: Ints) -> None:
        """Tokens that a step was to draw are known: what they are, and where in their sequences."""
        self.tokens[slots, at] = tokens
        self.pending[slots] -= 1

    def remove(self, request: Request) -> Ints:
        """Take a request out of its slot; its tokens stay with it, and its pages are returned."""
        slot = request.slot
        request.tokens = self.tokens[slot, : self.known[slot] - self.pending[slot]].copy()
        pages = self.pages[slot, : self.held[slot]].copy()
        self.pages[slot, : self.held[slot]] = 0
        self.held[slot] = self.computed[slot] = self.known[slot] = self.pending[slot] = 0
        self.used[slot] = self.decoding[slot] = False
        self.owners[slot] = None
        request.slot = -1
        self._free.append(slot)
        return pages
