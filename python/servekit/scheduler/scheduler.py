"""Decides what each step computes: continuous batching with chunked prefill over a paged KV pool.

A step holds one token of every decoding request and pieces of prompts. `plan` makes it, a model runner computes it,
`complete` takes in its tokens. Nothing here waits, sends or computes.

The next step may be planned while one is computed: where it goes on from a token that is still to be drawn, the runner
puts that in. A request that turns out to have ended was then computed once too often, which is passed over. A device
does its steps in order, so pages can be given to others as soon as their owner has left: whoever writes there still
has done so before the new owner does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servekit.engine.plan import BAD_LOGITS, Ints, Plan, StepResult
from servekit.messages.batches import BatchTokenIDOutput, FinishReason
from servekit.messages.envelope import Load
from servekit.scheduler.columns import logprob_columns, prompt_logprob_columns, sampling_columns
from servekit.scheduler.config import SchedulerConfig
from servekit.scheduler.logprobs import Columns
from servekit.scheduler.outputs import Outputs
from servekit.scheduler.request import Limits, Request, RequestError, make_request
from servekit.scheduler.running import RunningBatch


@dataclass(slots=True, frozen=True)
class Step:
    """A plan, and to which slots its rows belong; serials tell whether they still do when its tokens arrive.

    `prompts` are the rows that get logprobs of their prompt, and the places of these in the result; `decoded` rows
    continue, those after them are pieces of prompts; `began` is when it was planned.
    """

    plan: Plan
    slots: Ints
    serials: Ints
    prompts: list[tuple[int, range]]
    decoded: int
    began: float


class Scheduler:
    """Requests of one rank from acceptance to their single finished row.

    Args:
        config: its sizes.
        clock: seconds; how long a request has waited matters to some policies.

    Attributes:
        config: its sizes.
        pool_tokens: tokens that the KV pool holds.
        max_tokens: most tokens of one request, prompt and output: the context, or the pool if that is smaller.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self.pool_tokens = config.pages * config.page
        self.max_tokens = min(config.max_model_len, self.pool_tokens)
        end_ids = np.array(sorted(set(config.end_ids)), dtype=np.int64)
        end_ids = end_ids[(end_ids >= 0) & (end_ids < config.vocab_size)]
        self._limits = Limits(config.vocab_size, self.max_tokens, end_ids, config.seed)
        self._is_end = np.zeros(config.vocab_size, np.bool_)
        self._is_end[end_ids] = True
        self._batch = RunningBatch(config, self.max_tokens, clock)
        self._table, self._waiting = self._batch.table, self._batch.waiting
        self._requests: dict[int, Request] = {}
        self._outputs = Outputs()
        self._arrivals = 0
        self._steps = 0
        self._completed = 0.0

    @property
    def retractions(self) -> int:
        """How often a request lost its pages because they were short or others more urgent."""
        return self._batch.retractions

    # What comes in

    def add(self, rid: int, body: Any) -> bool:
        """Accept a request, or refuse it with an error row.

        Returns:
            False if a request of this id lives already: nothing is done, its one finished row belongs to the other.
        """
        if rid in self._requests:
            return False
        try:
            if len(self._waiting) >= self.config.max_waiting:
                raise RequestError(f"{len(self._waiting)} requests wait already", 503)
            request = make_request(rid, body, self._arrivals, self._limits)
        except RequestError as error:
            self.refuse(rid, str(error), error.status)
            return True
        self._arrivals += 1
        if (reason := self._over(request)) is not None:
            self._report_end(request, reason)
            return True
        request.since = self._clock()
        self._requests[rid] = request
        self._waiting.add(request)
        return True

    def _over(self, request: Request) -> FinishReason | None:
        """Why a resumed request has ended already, None if it has not."""
        if len(request.tokens) == request.prompt_tokens:
            return None
        last = int(request.tokens[-1])
        if last in request.stop_ids or (self._is_end[last] and not request.params.ignore_eos):
            return FinishReason("stop", matched=last)
        return FinishReason("length") if len(request.tokens) >= request.limit else None

    def refuse(self, rid: int, message: str, status: int) -> None:
        """Close a request that was never accepted."""
        self._outputs.close(rid, FinishReason("error", message=message, status=status), 0, 0, 0, 0)

    def abort(self, rid: int, reason: str = "") -> None:
        """End a request, in whatever phase, and free its pages now. An unknown id means nothing."""
        request = self._requests.get(rid)
        if request is not None:
            self._close(request, FinishReason("abort", message=reason or None))

    def flush_cache(self) -> bool:
        """Forget every cached prefix that no request uses; False if some are in use, and stay."""
        self._batch.memory.flush()
        return self._batch.memory.cache.pages == 0

    def close_all(self, message: str, status: int) -> None:
        """End every request with an error."""
        for request in list(self._requests.values()):
            self._close(request, FinishReason("error", message=message, status=status))

    # Steps

    def plan(self) -> Step | None:
        """The next step, or None if there is nothing to compute before an earlier step is complete."""
        t = self._table
        if self.config.flights == 1 and (t.decoding & t.penalized & (t.pending > 0)).any():
            # What is drawn next depends on a token that nobody knows yet.
            return None
        self._batch.make_room()
        most = self.config.max_rows or self.config.max_running
        slots = self._batch.decodes(most)
        starts, counts = t.computed[slots], np.ones(len(slots), np.int64)
        pieces = self._batch.pieces(most - len(slots))
        if pieces:
            more = np.array([(request.slot, t.computed[request.slot], count) for request, count in pieces], np.int64)
            slots = np.concatenate((slots, more[:, 0]))
            starts, counts = np.concatenate((starts, more[:, 1])), np.concatenate((counts, more[:, 2]))
        if not len(slots):
            return None
        decoded = len(slots) - len(pieces)
        ids = t.tokens[slots[:decoded], starts[:decoded]].astype(np.int64)
        if pieces:
            parts = [t.tokens[s, a : a + n] for s, a, n in more.tolist()]
            ids = np.concatenate((ids, *parts), dtype=np.int64, casting="same_kind")
        carried = np.flatnonzero(t.pending[slots[:decoded]])
        width = -(-int((starts + counts).max()) // t.page)
        sampled = np.flatnonzero(starts + counts == t.known[slots])
        self._steps += 1
        t.planned[slots] = self._steps
        prompts, places = prompt_logprob_columns(
            [(r, t.tokens[r.slot], int(t.computed[r.slot]), int(t.computed[r.slot]) + count) for r, count in pieces]
        )
        plan = Plan(
            self._steps,
            ids,
            starts,
            counts,
            t.pages[slots, :width],
            sampled,
            sampling_columns(t, slots[sampled]),
            logprob_columns(t, slots[sampled]),
            # Tokens of prompts lie behind those of the decoding requests.
            prompts and replace(prompts, at=prompts.at + decoded),
            np.stack((carried, t.drawn_at[slots[carried]])) if len(carried) else None,
        )
        self._batch.advance(slots, counts, slots[sampled])
        rows = [(decoded + piece, there) for piece, there in places]
        return Step(plan, slots, t.serial[slots], rows, decoded, self._clock())

    def complete(self, step: Step, result: StepResult) -> None:
        """Take in what a runner made of a step.

        Rows whose request ended since the step was planned are passed over.
        """
        t, plan = self._table, step.plan
        # A step that was planned while another was computed began when that one was done.
        began, self._completed = max(step.began, self._completed), self._clock()
        self._batch.pace.step_took(self._completed - began, step.decoded, int(plan.counts[step.decoded :].sum()))
        live = t.serial[step.slots] == step.serials
        live &= t.used[step.slots]
        if (found := result.prompt_logprobs) is not None:
            for row, places in step.prompts:
                if live[row] and (state := t.owner(int(step.slots[row])).logprobs) is not None:
                    state.add(found, places)
        told = live[plan.sampled]
        rows, at = plan.sampled[told], plan.sampling.position[told]
        slots, new = step.slots[rows], result.tokens[rows, 0]
        bad = new == BAD_LOGITS
        if bad.any():
            for slot in slots[bad].tolist():
                reason = FinishReason("error", message="the model's output for this request is not finite", status=500)
                self._close(t.owner(slot), reason)
            slots, at, new = slots[~bad], at[~bad], new[~bad]
            # Whatever made the logits so may be in its pages.
            self._batch.memory.flush()
        t.fill(slots, at, new)
        for i in np.flatnonzero(t.penalized[slots]).tolist():
            if (seen := t.owner(int(slots[i])).seen) is not None:
                seen.add(int(new[i]))
        self._emit(slots, at, new, self._told(step, result, slots, at))

    def _told(self, step: Step, result: StepResult, slots: Ints, at: Ints) -> dict[int, Columns]:
        """Logprob columns of the slots that got a token, by index among them; `at` is the token's place."""
        t, plan, found = self._table, step.plan, result.logprobs
        if plan.logprobs is None or found is None:
            return {}
        place_of = {slot: place for place, slot in enumerate(step.slots[plan.sampled[plan.logprobs.at]].tolist())}
        told = {}
        for i in np.flatnonzero(t.tells[slots]).tolist():
            slot = int(slots[i])
            if (state := t.owner(slot).logprobs) is not None:
                told[i] = state.row(found, place_of[slot], t.tokens[slot, : at[i] + 1])
        return told

    # What goes out

    def take_batch(self) -> BatchTokenIDOutput | None:
        """Rows made since the last call, or None."""
        return self._outputs.take()

    def load(self) -> Load:
        """The load now."""
        t = self._table
        pending = sum(int(t.known[r.slot] - t.computed[r.slot]) for r in self._batch.prefilling)
        return Load(
            running=t.running,
            waiting=len(self._waiting),
            held_tokens=int(t.computed.sum()),
            pending_tokens=self._waiting.tokens + pending,
            pool_tokens=self.pool_tokens,
        )

    def state(self) -> dict[str, Any]:
        """Plain values for `/debug/state`."""
        return {
            "live": len(self._requests),
            "running": self._table.running,
            "waiting": len(self._waiting),
            "prefilling": len(self._batch.prefilling),
            "pages_held": self.config.pages - self._batch.memory.available,
            "pages_cached": self._batch.memory.cache.evictable,
            "pages_free": self._batch.memory.allocator.free,
            "held_tokens": int(self._table.computed.sum()),
            "pool_tokens": self.pool_tokens,
            "steps": self._steps,
            "retractions": self._batch.retractions,
        }

    # Inside

    def _emit(self, slots: Ints, at: Ints, new: Ints, told: dict[int, Columns]) -> None:
        """Report new tokens, by their places in their sequences, and close the requests that end with them."""
        if not len(slots):
            return
        t = self._table
        stopped = self._is_end[new] & ~t.ignores_end[slots]
        for i in np.flatnonzero(t.has_stops[slots]).tolist():
            stopped[i] |= int(new[i]) in self._table.owner(int(slots[i])).stop_ids
        ended = np.flatnonzero(stopped | (at + 1 >= t.limit[slots])).tolist()
        reasons: list[FinishReason | None] | None = None
        if ended:
            reasons = [None] * len(slots)
            for i in ended:
                reasons[i] = FinishReason("stop", matched=int(new[i])) if stopped[i] else FinishReason("length")
        generated = at + 1 - t.prompt[slots]
        # Of a request that is not streamed the worker sees the last row alone.
        telling = {*np.flatnonzero(generated == 1).tolist(), *ended}
        waits = {row: self._table.owner(int(slots[row])).waited for row in telling}
        counts = (t.prompt[slots], generated, t.cached[slots], t.retractions[slots])
        self._outputs.step(t.rid[slots], new, *counts, reasons, told, waits)
        for i in ended:
            self._release(self._table.owner(int(slots[i])))

    def _close(self, request: Request, reason: FinishReason) -> None:
        """End a request between its tokens: one finished row without ids."""
        if request.slot < 0:
            self._waiting.remove(request)
            del self._requests[request.rid]
        else:
            self._release(request)
        self._report_end(request, reason)

    def _report_end(self, request: Request, reason: FinishReason) -> None:
        generated = len(request.tokens) - request.prompt_tokens
        counts = (request.prompt_tokens, generated, max(request.cached, 0), request.retractions)
        self._outputs.close(request.rid, reason, *counts)

    def _release(self, request: Request) -> None:
        self._batch.leave(request)
        del self._requests[request.rid]


__all__ = ["Scheduler", "SchedulerConfig", "Step"]
