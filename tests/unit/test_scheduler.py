"""The scheduler's promises: one finished row a request, no page lost, limits kept, whatever comes in."""

from __future__ import annotations

import random

import numpy as np
import pytest
from servekit.engine.dummy_runner import DummyRunner
from servekit.engine.plan import BAD_LOGITS
from servekit.messages.batches import FinishReason
from servekit.messages.requests import SamplingParams, TokenizedGenerateReqInput
from servekit.scheduler.pages import PageAllocator
from servekit.scheduler.scheduler import Scheduler, Step

from tests.unit.scheduler_world import END, VOCAB, Rows, Scripted, body, check_pages, config, drain


def test_length_is_counted_from_the_first_token() -> None:
    scheduler = Scheduler(config())
    scheduler.add(1, body(1, 3, max_new_tokens=1))
    scheduler.add(2, body(2, 40, max_new_tokens=5))
    rows = drain(scheduler)
    assert {rid: (end.type, len(rows.ids[rid])) for rid, end in rows.ends.items()} == {
        1: ("length", 1),
        2: ("length", 5),
    }
    assert rows.prompts == {1: 3, 2: 40}


def test_an_end_token_ends_the_request_and_is_its_last_id() -> None:
    scheduler = Scheduler(config())
    scheduler.add(1, body(1, 3, ignore_eos=False))
    rows = drain(scheduler, runner=Scripted([7, 8, END]))
    assert rows.ids[1] == [7, 8, END]
    assert rows.ends[1] == FinishReason("stop", matched=END)


def test_ignore_eos_ignores_the_models_end_tokens_but_not_stop_token_ids() -> None:
    scheduler = Scheduler(config())
    scheduler.add(1, body(1, 3, ignore_eos=True, stop_token_ids=[9], max_new_tokens=20))
    rows = drain(scheduler, runner=Scripted([END, 7, 9]))
    assert rows.ids[1] == [END, 7, 9]
    assert rows.ends[1] == FinishReason("stop", matched=9)


def test_end_tokens_are_barred_until_min_tokens() -> None:
    scheduler = Scheduler(config())
    scheduler.add(1, body(1, 3, ignore_eos=False, stop_token_ids=[9], min_new_tokens=2, max_new_tokens=3))
    scheduler.add(2, body(2, 3, max_new_tokens=3))
    barred = []
    while (step := scheduler.plan()) is not None:
        barred.append([None if ids is None else ids.tolist() for ids in step.plan.sampling.forbidden or []])
        scheduler.complete(step, Scripted([7] * 9).run(step.plan))
        scheduler.take_batch()
    assert barred == [[[END, 9], None], [[END, 9], None], []]


def test_the_context_ends_a_request_with_length() -> None:
    scheduler = Scheduler(config(max_model_len=20))
    scheduler.add(1, body(1, 15, max_new_tokens=1000))
    rows = drain(scheduler)
    assert len(rows.ids[1]) == 5
    assert rows.ends[1].type == "length"


def test_a_pool_smaller_than_the_context_bounds_a_request() -> None:
    scheduler = Scheduler(config(pages=5, max_model_len=128))
    assert scheduler.max_tokens == 20
    scheduler.add(1, body(1, 19, max_new_tokens=1000))
    scheduler.add(2, body(2, 20))
    rows = drain(scheduler)
    assert (rows.ends[1].type, len(rows.ids[1])) == ("length", 1)
    assert rows.ends[2] == FinishReason("error", message="the prompt has 20 tokens, at most 19 fit", status=400)


@pytest.mark.parametrize(
    "broken",
    [
        body(1, [VOCAB]),
        body(1, [2**32 - 1]),
        body(1, []),
        TokenizedGenerateReqInput(1, b"abc", SamplingParams(4)),
        body(1, 3, temperature=float("nan")),
        body(1, 3, temperature=-1.0),
        body(1, 3, top_p=0.0),
        body(1, 3, top_p=float("nan")),
        body(1, 3, top_k=-2),
        body(1, 3, min_p=2.0),
        body(1, 3, max_new_tokens=0),
        body(1, 3, stop_token_ids=[VOCAB]),
        body(1, 3, repetition_penalty=0.0),
        body(1, 3, presence_penalty=float("nan")),
        body(1, 3, frequency_penalty=1e9),
        body(1, 3, logit_bias={VOCAB: 1.0}),
        body(1, 3, logit_bias={3: float("inf")}),
        3.5,
    ],
    ids=lambda b: repr(b)[-60:],
)
def test_a_broken_request_gets_an_error_row_and_nobody_else_notices(broken: object) -> None:
    scheduler = Scheduler(config())
    scheduler.add(2, body(2, 10))
    assert scheduler.add(1, broken)
    rows = drain(scheduler)
    assert (rows.ends[1].type, rows.ends[1].status) == ("error", 400)
    assert rows.ends[1].message
    assert (rows.ends[2].type, len(rows.ids[2])) == ("length", 8)


def test_a_row_that_is_not_finite_ends_alone() -> None:
    scheduler = Scheduler(config())
    scheduler.add(1, body(1, 3, max_new_tokens=3))
    scheduler.add(2, body(2, 3, max_new_tokens=3))
    rows = drain(scheduler, runner=Scripted([7, 7, BAD_LOGITS, 7, 7]))
    assert (rows.ends[1].type, rows.ends[1].status, rows.ids[1]) == ("error", 500, [7])
    assert (rows.ends[2].type, rows.ids[2]) == ("length", [7, 7, 7])


def test_a_second_request_of_a_living_id_is_ignored() -> None:
    scheduler = Scheduler(config())
    assert scheduler.add(1, body(1, 3))
    assert not scheduler.add(1, body(1, 5))
    assert drain(scheduler).prompts == {1: 3}


def test_a_full_queue_refuses() -> None:
    scheduler = Scheduler(config(max_waiting=2))
    for rid in range(3):
        scheduler.add(rid, body(rid, 3))
    rows = drain(scheduler)
    assert (rows.ends[2].type, rows.ends[2].status) == ("error", 503)
    assert rows.ends[0].type == rows.ends[1].type == "length"


def test_first_come_first_served() -> None:
    scheduler = Scheduler(config(max_running=1))
    for rid in (3, 1, 2):
        scheduler.add(rid, body(rid, 3, max_new_tokens=2))
    assert list(drain(scheduler).ends) == [3, 1, 2]


def test_long_prompts_come_in_chunks_beside_decoding_requests() -> None:
    scheduler = Scheduler(config(max_prefill_tokens=16))
    runner = Scripted([7] * 99)
    scheduler.add(1, body(1, 3, max_new_tokens=30))
    steps = 0
    rows = Rows()
    while (step := scheduler.plan()) is not None:
        if steps == 2:
            scheduler.add(2, body(2, 60, max_new_tokens=2))
        if 3 <= steps < 7:
            assert step.plan.counts.tolist() == [1, min(16, 60 - 16 * (steps - 3))]
            assert len(step.plan.sampled) == (2 if steps == 6 else 1)
        scheduler.complete(step, runner.run(step.plan))
        rows.take(scheduler.take_batch())
        steps += 1
    assert {rid: end.type for rid, end in rows.ends.items()} == {1: "length", 2: "length"}


def test_abort_while_waiting_prefilling_decoding_in_flight_and_after_the_end() -> None:
    scheduler = Scheduler(config(max_running=3, chunked_prefill_size=8, max_prefill_tokens=16))
    dummy, rows = DummyRunner(VOCAB), Rows()
    scheduler.add(1, body(1, 4, max_new_tokens=50))
    scheduler.add(2, body(2, 60))
    scheduler.add(3, body(3, 4, max_new_tokens=50))
    scheduler.add(4, body(4, 4))
    for _ in range(2):
        step = scheduler.plan()
        assert step is not None
        scheduler.complete(step, dummy.launch(step.plan))
        rows.take(scheduler.take_batch())
    held = scheduler.state()["pages_held"]
    scheduler.abort(4, "client left")
    assert scheduler.state()["pages_held"] == held
    scheduler.abort(2)
    assert scheduler.state()["pages_held"] == held - 15
    in_flight = scheduler.plan()
    assert in_flight is not None
    scheduler.abort(1)
    scheduler.abort(1)
    scheduler.abort(99)
    assert scheduler.state()["pages_held"] < held - 15
    rows.take(scheduler.take_batch())
    # Its slot goes to another request while the step is still computed.
    scheduler.add(5, body(5, 4, max_new_tokens=1))
    scheduler.complete(in_flight, dummy.launch(in_flight.plan))
    rows.take(scheduler.take_batch())
    drain(scheduler, rows)
    scheduler.abort(3)
    assert scheduler.take_batch() is None
    types = {rid: end.type for rid, end in rows.ends.items()}
    assert types == {4: "abort", 2: "abort", 1: "abort", 3: "length", 5: "length"}
    assert rows.ends[4].message == "client left"
    assert (len(rows.ids[3]), len(rows.ids[5])) == (50, 1)


def test_a_late_step_does_not_touch_the_next_request_of_its_slot() -> None:
    scheduler = Scheduler(config(max_running=1))
    scheduler.add(1, body(1, 4))
    late = scheduler.plan()
    scheduler.abort(1)
    scheduler.add(2, body(2, 4, max_new_tokens=1))
    step = scheduler.plan()
    assert late is not None and step is not None and late.slots.tolist() == step.slots.tolist()
    scheduler.complete(late, Scripted([7]).run(late.plan))
    scheduler.complete(step, Scripted([8]).run(step.plan))
    rows = drain(scheduler)
    assert (rows.ids, rows.ends[1].type, rows.ends[2].type) == ({1: [], 2: [8]}, "abort", "length")


def test_short_memory_retracts_and_the_tokens_stay_the_same() -> None:
    def tokens(pages: int) -> Rows:
        scheduler = Scheduler(config(pages=pages))
        for rid in range(8):
            scheduler.add(rid, body(rid, 6 + rid, max_new_tokens=40))
        return drain(scheduler)

    roomy, tight = tokens(200), tokens(14)
    assert not roomy.retractions
    assert max(tight.retractions.values()) > 0
    assert tight.ids == roomy.ids


def test_load_counts_every_request_that_is_not_released() -> None:
    scheduler = Scheduler(config(max_running=2))
    for rid in range(3):
        scheduler.add(rid, body(rid, 20, max_new_tokens=4))
    load = scheduler.load()
    assert (load.running, load.waiting, load.held_tokens, load.pending_tokens) == (0, 3, 0, 60)
    step = scheduler.plan()
    assert step is not None
    scheduler.complete(step, DummyRunner(VOCAB).launch(step.plan))
    load = scheduler.load()
    assert (load.running, load.waiting, load.held_tokens, load.pending_tokens) == (2, 1, 32, 28)
    assert load.pool_tokens == 256


def test_close_all_ends_everyone_once() -> None:
    scheduler = Scheduler(config(max_running=2))
    for rid in range(4):
        scheduler.add(rid, body(rid, 20))
    step = scheduler.plan()
    assert step is not None
    scheduler.close_all("stopped", 503)
    scheduler.complete(step, DummyRunner(VOCAB).launch(step.plan))
    rows = drain(scheduler)
    assert {(end.type, end.status) for end in rows.ends.values()} == {("error", 503)}
    assert sorted(rows.ends) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(30))
def test_random_lives(seed: int) -> None:
    """Random lengths, stops and aborts over a pool that is far too small: one end each, and no page lost."""
    rng = random.Random(seed)
    pages = rng.choice((3, 6, 20))
    sizes = {"page": rng.choice((1, 4, 5)), "pages": pages, "max_running": rng.choice((1, 3, 8))}
    sizes |= {"policy": rng.choice(("fcfs", "lpm", "priority")), "prefix_cache": rng.random() < 0.8}
    sizes |= {"max_prefill_tokens": rng.choice((5, 64)), "chunked_prefill_size": rng.choice((3, 5))}
    scheduler = Scheduler(config(**sizes))
    dummy, rows = DummyRunner(VOCAB), Rows()
    in_flight: list[Step] = []
    asked, aborted = 0, set()
    for _ in range(600):
        if asked < 150 and rng.random() < 0.5:
            limit = rng.choice((1, 3, 200))
            params = {
                "max_new_tokens": limit,
                "ignore_eos": rng.random() < 0.5,
                "stop_token_ids": rng.choice(([], [9])),
            }
            params["min_new_tokens"] = rng.choice((0, 2))
            # Many begin alike, some with tokens that others generated.
            begin = rng.choice((6, 6, 40, rng.randrange(VOCAB)))
            prompt = [(begin + i) % VOCAB for i in range(rng.randrange(0, 24))]
            if rows.ids and rng.random() < 0.3:
                prompt += rows.ids[rng.choice(list(rows.ids))][:20]
            params |= {"salt": rng.choice((None, None, "a")), "priority": rng.randrange(3)}
            scheduler.add(asked, body(asked, prompt, **params))
            asked += 1
        if asked and rng.random() < 0.15:
            rid = rng.randrange(asked)
            aborted.add(rid)
            scheduler.abort(rid)
            rows.take(scheduler.take_batch())
        if (step := scheduler.plan()) is not None:
            check_pages(scheduler, step)
            in_flight.append(step)
            if rng.random() < 0.1:
                scheduler.abort(rng.randrange(asked))
                rows.take(scheduler.take_batch())
            scheduler.complete(step, dummy.launch(step.plan))
        check_pages(scheduler)
        rows.take(scheduler.take_batch())
        if rng.random() < 0.02:
            scheduler.flush_cache()
    drain(scheduler, rows)
    assert scheduler.flush_cache()
    assert scheduler.state()["pages_free"] == pages
    assert sorted(rows.ends) == list(range(asked))


def test_pages_cannot_be_owned_twice() -> None:
    allocator = PageAllocator(4)
    pages = allocator.take(3)
    assert allocator.free == 1
    with pytest.raises(RuntimeError, match="2 pages asked for, 1 are free"):
        allocator.take(2)
    allocator.give(pages[:1])
    with pytest.raises(RuntimeError, match="not held"):
        allocator.give(pages[:1])
    with pytest.raises(RuntimeError, match="twice"):
        allocator.give(np.array([pages[1], pages[1]]))
    assert 0 not in np.concatenate((PageAllocator(4).take(4), pages))
