"""The scheduler of texts: one row each, in the order they came, whatever comes in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from servekit.engine.embedding_plan import EmbeddingPlan, EmbeddingRunner
from servekit.messages.batches import FinishReason
from servekit.messages.requests import SamplingParams, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from servekit.scheduler.embedding import EmbeddingConfig, EmbeddingScheduler


class Sums:
    """A runner whose vector is (sum of the ids, number of ids, 0), normalized."""

    def __init__(self) -> None:
        self.info: dict[str, Any] = {}

    def launch(self, plan: EmbeddingPlan) -> np.ndarray:
        parts = np.split(plan.ids, np.cumsum(plan.counts)[:-1])
        vectors = np.array([(part.sum(), len(part), 0) for part in parts], np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def collect(self, handle: np.ndarray) -> np.ndarray:
        return handle


def text(rid: int, ids: list[int], dimensions: int | None = None) -> TokenizedEmbeddingReqInput:
    return TokenizedEmbeddingReqInput(rid, np.array(ids, "<u4").tobytes(), dimensions)


def make(**changes: Any) -> EmbeddingScheduler:
    sizes = {"max_running": 4, "max_waiting": 50, "max_prefill_tokens": 10, "max_model_len": 12, "vocab_size": 100}
    return EmbeddingScheduler(EmbeddingConfig(**{**sizes, "size": 3, "normalized": True, **changes}))


def rows(scheduler: EmbeddingScheduler) -> dict[int, tuple[FinishReason | None, np.ndarray]]:
    batch = scheduler.take_batch()
    if batch is None:
        return {}
    assert isinstance(batch.embeddings, list) and batch.finished_reasons is not None
    vectors = [np.frombuffer(row, "<f4") for row in batch.embeddings]
    found = dict(zip(batch.rids, zip(batch.finished_reasons, vectors, strict=True), strict=True))
    assert len(found) == len(batch.rids)
    return found


def take_all(scheduler: EmbeddingScheduler, runner: EmbeddingRunner) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    while (step := scheduler.plan()) is not None:
        scheduler.complete(step, runner.collect(runner.launch(step.plan)))
        found |= {rid: vector for rid, (_, vector) in rows(scheduler).items()}
    assert scheduler.state()["live"] == 0
    load = scheduler.load()
    assert (load.running, load.waiting, load.pending_tokens) == (0, 0, 0)
    return found


def test_texts_are_computed_in_the_order_they_came_within_the_budget() -> None:
    scheduler = make()
    sizes = [3, 3, 3, 3, 12, 1, 1, 1, 1, 1]
    for rid, n in enumerate(sizes):
        scheduler.add(rid, text(rid, [rid + 1] * n))
    assert scheduler.load().pending_tokens == sum(sizes)
    steps = []
    runner = Sums()
    while (step := scheduler.plan()) is not None:
        steps.append(step.rids)
        assert scheduler.load().running == len(step.rids)
        scheduler.complete(step, runner.launch(step.plan))
    assert steps == [[0, 1, 2], [3], [4], [5, 6, 7, 8], [9]]
    found = rows(scheduler)
    for rid, n in enumerate(sizes):
        reason, vector = found[rid]
        expected = np.array([(rid + 1) * n, n, 0]) / np.hypot((rid + 1) * n, n)
        assert reason == FinishReason("stop")
        assert np.allclose(vector, expected, atol=1e-6)


def test_fewer_dimensions_are_normalized_again() -> None:
    scheduler = make()
    scheduler.add(1, text(1, [2, 2], dimensions=1))
    scheduler.add(2, text(2, [2, 2], dimensions=2))
    found = take_all(scheduler, Sums())
    assert found[1].tolist() == [1]
    assert np.allclose(found[2], np.array([4, 2]) / np.sqrt(20))
    scheduler = make(normalized=False)
    scheduler.add(1, text(1, [2, 2], dimensions=1))
    assert np.allclose(take_all(scheduler, Sums())[1], 4 / np.sqrt(20))


@pytest.mark.parametrize(
    "broken",
    [
        text(1, []),
        text(1, [100]),
        text(1, [1] * 13),
        text(1, [1], dimensions=4),
        text(1, [1], dimensions=0),
        TokenizedEmbeddingReqInput(1, b"abc"),
        TokenizedGenerateReqInput(1, b"\1\0\0\0", SamplingParams(4)),
        3.5,
    ],
    ids=lambda b: repr(b)[-60:],
)
def test_a_broken_text_is_refused_and_nobody_else_notices(broken: object) -> None:
    scheduler = make()
    scheduler.add(2, text(2, [1]))
    scheduler.add(1, broken)
    reason, vector = rows(scheduler)[1]
    assert reason is not None and (reason.type, reason.status, len(vector)) == ("error", 400, 0)
    assert list(take_all(scheduler, Sums())) == [2]


def test_a_full_queue_refuses_and_a_living_id_is_ignored() -> None:
    scheduler = make(max_waiting=2)
    assert scheduler.add(1, text(1, [1]))
    assert not scheduler.add(1, text(1, [1]))
    scheduler.add(2, text(2, [1]))
    scheduler.add(3, text(3, [1]))
    reason, _ = rows(scheduler)[3]
    assert reason is not None and reason.status == 503
    assert sorted(take_all(scheduler, Sums())) == [1, 2]


def test_aborts_before_and_during_the_step() -> None:
    scheduler = make(max_running=2)
    for rid in range(4):
        scheduler.add(rid, text(rid, [1, 2]))
    step = scheduler.plan()
    assert step is not None and step.rids == [0, 1]
    for rid in (1, 2, 2, 77):
        scheduler.abort(rid, "gone")
    assert {rid: reason.type for rid, (reason, _) in rows(scheduler).items() if reason} == {1: "abort", 2: "abort"}
    scheduler.complete(step, Sums().launch(step.plan))
    assert list(rows(scheduler)) == [0]
    assert list(take_all(scheduler, Sums())) == [3]
    scheduler.add(5, text(5, [1]))
    scheduler.close_all("stopped", 503)
    assert [(rid, reason.status) for rid, (reason, _) in rows(scheduler).items() if reason] == [(5, 503)]
    assert scheduler.plan() is None


def test_a_vector_that_is_not_finite_is_an_error_of_its_own() -> None:
    scheduler = make()
    scheduler.add(1, text(1, [1]))
    scheduler.add(2, text(2, [1]))
    step = scheduler.plan()
    assert step is not None
    scheduler.complete(step, np.array([[1, np.nan, 0], [1, 0, 0]], np.float32))
    found = rows(scheduler)
    assert found[1][0] is not None and found[1][0].status == 500
    assert found[2][0] == FinishReason("stop")
