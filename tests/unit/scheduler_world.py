"""A scheduler over a runner without a model, and what its tests check after every step."""

from __future__ import annotations

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


def body(rid: int, prompt: int | list[int], **params: object) -> TokenizedGenerateReqInput:
    ids = list(range(6, 6 + prompt)) if isinstance(prompt, int) else prompt
    ids = [i % VOCAB if isinstance(prompt, int) else i for i in ids]
    sampling = SamplingParams(**{"max_new_tokens": 8, "ignore_eos": True, "seed": rid, **params})
    return TokenizedGenerateReqInput(rid, np.array(ids, "<u4").tobytes(), sampling)


class Rows:
    """What came out of a scheduler, by request."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.retractions: dict[int, int] = {}
        self.prompts: dict[int, int] = {}

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


def drain(scheduler: Scheduler, rows: Rows | None = None, runner: Scripted | None = None) -> Rows:
    rows = rows or Rows()
    dummy = DummyRunner(VOCAB)
    rows.take(scheduler.take_batch())
    while (step := scheduler.plan()) is not None:
        check_pages(scheduler, step)
        scheduler.complete(step, runner.run(step.plan) if runner else dummy.collect(dummy.launch(step.plan)))
        rows.take(scheduler.take_batch())
    state = scheduler.state()
    assert (state["live"], state["running"], state["waiting"], state["pages_held"]) == (0, 0, 0, 0)
    load = scheduler.load()
    assert (load.running, load.waiting, load.held_tokens, load.pending_tokens) == (0, 0, 0, 0)
    return rows


def check_pages(scheduler: Scheduler, step: Step) -> None:
    """Every page that a step writes or reads belongs to one row, and there are enough for its tokens."""
    plan, page = step.plan, scheduler.config.page
    owned: list[int] = []
    for row in range(len(plan.counts)):
        need = -(-int(plan.starts[row] + plan.counts[row]) // page)
        pages = plan.tables[row]
        assert (pages[:need] > 0).all()
        owned += pages[pages > 0].tolist()
    assert len(set(owned)) == len(owned)
    state = scheduler.state()
    assert state["pages_held"] + state["pages_free"] == scheduler.config.pages
    assert len(plan.ids) == plan.counts.sum()
    assert plan.counts[plan.counts > 1].sum() <= scheduler.config.max_prefill_tokens
    assert plan.counts.max() <= scheduler.config.chunked_prefill_size
