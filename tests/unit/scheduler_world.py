"""A scheduler over a runner without a model, and what its tests check after every step."""

from __future__ import annotations

import hashlib

import numpy as np
from servekit.engine.dummy_runner import DummyRunner
from servekit.engine.plan import Plan, StepResult
from servekit.messages.batches import BatchTokenIDOutput, FinishReason
from servekit.messages.requests import SamplingParams, TokenizedGenerateReqInput
from servekit.scheduler.scheduler import Scheduler, SchedulerConfig, Step

VOCAB = 97
END = 5


def config(**changes: object) -> SchedulerConfig:
    sizes = {
        "max_running": 8,
        "max_waiting": 1000,
        "max_prefill_tokens": 64,
        "chunked_prefill_size": 16,
        "page": 4,
        "pages": 64,
        "max_model_len": 128,
        "vocab_size": VOCAB,
        "end_ids": (END,),
    }
    return SchedulerConfig(**{**sizes, **changes})


def body(
    rid: int, prompt: int | list[int], *, salt: str | None = None, priority: int | None = None, **params: object
) -> TokenizedGenerateReqInput:
    # Without ids given, no two requests begin alike.
    ids = [(i + 17 * rid + 6) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else prompt
    sampling = SamplingParams(**{"max_new_tokens": 8, "ignore_eos": True, "seed": rid, **params})
    packed = np.array(ids, "<u4").tobytes()
    return TokenizedGenerateReqInput(rid, packed, sampling, cache_salt=salt, priority=priority)


class Rows:
    """What came out of a scheduler, by request."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.retractions: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.cached: dict[int, int] = {}

    def take(self, batch: BatchTokenIDOutput | None) -> None:
        if batch is None:
            return
        assert len(set(batch.rids)) == len(batch.rids)
        for i, rid in enumerate(batch.rids):
            assert rid not in self.ends, "a row after the finished one"
            assert batch.decode_ids is not None and batch.completion_tokens is not None
            self.ids.setdefault(rid, []).extend(np.frombuffer(batch.decode_ids[i], "<u4").tolist())
            assert batch.completion_tokens[i] == len(self.ids[rid])
            self.prompts[rid] = batch.prompt_tokens[i] if batch.prompt_tokens else 0
            self.cached[rid] = batch.cached_tokens[i] if batch.cached_tokens else 0
            if batch.retraction_counts:
                self.retractions[rid] = batch.retraction_counts[i]
            reason = batch.finished_reasons[i] if batch.finished_reasons else None
            if reason is not None:
                self.ends[rid] = reason


class Scripted:
    """A runner whose every row gets the next token of a list."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = iter(tokens)

    def run(self, plan: Plan) -> StepResult:
        out = np.full((len(plan.counts), 1), -1, np.int64)
        for row in plan.sampled.tolist():
            out[row] = next(self._tokens)
        return StepResult(out)


class Remembering:
    """A runner whose pool holds tokens in place of keys and values, and whose next token depends on all that it reads.

    Like a real one it stores all of a step's tokens before it reads any.

    Attributes:
        computed: tokens of all steps.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._page = scheduler.config.page
        self._pool = np.full((scheduler.config.pages + 1, self._page), -1, np.int64)
        self.computed = 0

    def run(self, plan: Plan) -> StepResult:
        self.computed += len(plan.ids)
        out = np.full((len(plan.counts), 1), -1, np.int64)
        at = 0
        for row, (start, count) in enumerate(zip(plan.starts.tolist(), plan.counts.tolist(), strict=True)):
            places = np.arange(start, start + count)
            self._pool[plan.tables[row, places // self._page], places % self._page] = plan.ids[at : at + count]
            at += count
        for row in plan.sampled.tolist():
            end = int(plan.starts[row] + plan.counts[row])
            read = self._pool[plan.tables[row, : -(-end // self._page)]].reshape(-1)[:end]
            out[row] = int(hashlib.blake2b(read.tobytes(), digest_size=4).hexdigest(), 16) % VOCAB
        return StepResult(out)


def drain(scheduler: Scheduler, rows: Rows | None = None, runner: Scripted | Remembering | None = None) -> Rows:
    rows = rows or Rows()
    dummy = DummyRunner(VOCAB)
    rows.take(scheduler.take_batch())
    while (step := scheduler.plan()) is not None:
        check_pages(scheduler, step)
        scheduler.complete(step, runner.run(step.plan) if runner else dummy.collect(dummy.launch(step.plan)))
        rows.take(scheduler.take_batch())
    check_pages(scheduler)
    state = scheduler.state()
    assert (state["live"], state["running"], state["waiting"], state["pages_held"]) == (0, 0, 0, 0)
    load = scheduler.load()
    assert (load.running, load.waiting, load.held_tokens, load.pending_tokens) == (0, 0, 0, 0)
    return rows


def check_pages(scheduler: Scheduler, step: Step | None = None) -> None:
    """Every page is free, in the cache, or one request's own; a step has the pages it needs and writes none of others.

    Args:
        step: that is about to be computed.
    """
    batch = scheduler._batch
    memory, table, page = batch.memory, batch.table, scheduler.config.page
    free = memory.allocator._stack[: memory.allocator.free].tolist()
    cached, evictable, refs = [], 0, {}
    nodes = [memory.cache.root]
    while nodes:
        node = nodes.pop()
        for child in node.children.values():
            assert child.parent is node and len(child.tokens) == page * len(child.pages) > 0
            assert child.refs <= node.refs
        nodes += node.children.values()
        cached += node.pages.tolist()
        evictable += 0 if node.refs else len(node.pages)
        refs[node] = node.refs
    assert (memory.cache.pages, memory.cache.evictable) == (len(cached), evictable)
    own: list[int] = []
    for slot in np.flatnonzero(table.used).tolist():
        request = table.owner(slot)
        pages, lease = table.pages[slot, : table.held[slot]], request.lease
        assert lease is not None and not table.pages[slot, table.held[slot] :].any()
        own += pages[lease.shared :].tolist()
        # What it shares lies along the way from the root to its node.
        way, tokens, above = [], [], lease.node
        while above is not None:
            refs[above] -= 1
            way, tokens, above = [*above.pages, *way], [*above.tokens, *tokens], above.parent
        assert way == pages[: lease.shared].tolist()
        assert tokens == table.tokens[slot, : lease.shared * page].tolist()
        assert table.held[slot] * page >= max(table.computed[slot], 1)
    assert not any(refs.values())
    assert sorted([*free, *cached, *own]) == list(range(1, scheduler.config.pages + 1))
    state = scheduler.state()
    assert state["pages_held"] + state["pages_cached"] + state["pages_free"] == scheduler.config.pages
    if step is not None:
        check_step(scheduler, step)


def check_step(scheduler: Scheduler, step: Step) -> None:
    """A step reads what is written, writes every place once, and keeps to its sizes."""
    plan, page = step.plan, scheduler.config.page
    written: list[tuple[int, int]] = []
    for row in range(len(plan.counts)):
        end = int(plan.starts[row] + plan.counts[row])
        assert (plan.tables[row][: -(-end // page)] > 0).all()
        written += [(plan.tables[row][at // page], at % page) for at in range(int(plan.starts[row]), end)]
    assert len(set(written)) == len(written)
    assert len(plan.ids) == plan.counts.sum()
    assert plan.counts[plan.counts > 1].sum() <= scheduler.config.max_prefill_tokens
    assert plan.counts.max() <= scheduler.config.chunked_prefill_size
