"""Shared prefixes: computed once, kept until pages are short, never mixed up, and nobody starves for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from servekit.messages.requests import TokenizedGenerateReqInput
from servekit.scheduler.prefix_cache import PrefixCache
from servekit.scheduler.scheduler import Scheduler
from servekit.scheduler.waiting import AGED_S

from tests.unit.scheduler_world import VOCAB, Remembering, Rows, body, check_pages, config, drain

PAGE = 4


def ids(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(6, VOCAB, n).tolist()


class World:
    """A scheduler with its runner; `run` drains it and returns what came out since the last call."""

    def __init__(self, **changes: Any) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(config(**changes), clock=lambda: self.now)
        self.runner = Remembering(self.scheduler)
        self._computed = 0

    def add(self, *bodies: TokenizedGenerateReqInput) -> None:
        for each in bodies:
            assert self.scheduler.add(each.rid, each)

    def step(self, rows: Rows) -> list[int]:
        """Compute one step; the requests in it."""
        step = self.scheduler.plan()
        if step is None:
            return []
        check_pages(self.scheduler, step)
        rids = self.scheduler._table.rid[step.slots].tolist()
        self.scheduler.complete(step, self.runner.run(step.plan))
        check_pages(self.scheduler)
        rows.take(self.scheduler.take_batch())
        return rids

    def run(self, *bodies: TokenizedGenerateReqInput) -> Rows:
        self.add(*bodies)
        return drain(self.scheduler, runner=self.runner)

    @property
    def computed(self) -> int:
        """Tokens computed since the last time this was asked."""
        now, self._computed = self.runner.computed - self._computed, self.runner.computed
        return now


@pytest.mark.parametrize(("prefill", "chunk"), [(1000, 1000), (1000, 16), (16, 16), (30, 7)])
def test_a_prefix_is_computed_once_by_requests_in_flight(prefill: int, chunk: int) -> None:
    prefix, asks = ids(41), {"max_new_tokens": 3}
    sizes = {"max_prefill_tokens": prefill, "chunked_prefill_size": chunk, "max_running": 16, "pages": 200}
    world = World(**sizes)
    bodies = [body(rid, prefix + [rid] * 3, **asks) for rid in range(16)]
    rows = world.run(*bodies)
    # Whole pages are shared; of three tokens that are drawn, the last is not computed.
    assert world.computed == 40 + 16 * (1 + 3) + 16 * 2
    assert [rows.cached[rid] for rid in range(16)] == [0] + [40] * 15
    alone = World(**sizes, prefix_cache=False).run(*bodies)
    assert alone.ids == rows.ids
    assert not any(alone.cached.values())


def test_who_waits_for_a_prefix_holds_up_nobody_else() -> None:
    world, rows = World(max_prefill_tokens=12, chunked_prefill_size=8), Rows()
    world.add(body(1, ids(40)), body(2, ids(40)), body(3, ids(10, seed=3)))
    assert world.step(rows) == [1, 3]
    assert world.step(rows) == [1, 3]
    while 2 not in world.step(rows):
        assert world.scheduler.state()["waiting"] == 1
    drain(world.scheduler, rows, world.runner)
    assert rows.cached[2] == 36


def test_choices_of_one_prompt_share_it() -> None:
    world = World()
    rows = world.run(*(body(rid, ids(30), seed=rid, max_new_tokens=1) for rid in range(4)))
    assert world.computed == 30 + 3 * 2
    assert [rows.cached[rid] for rid in range(4)] == [0, 28, 28, 28]


def test_the_next_turn_of_a_conversation_finds_the_last_one() -> None:
    world = World()
    first = ids(10)
    answer = world.run(body(1, first, max_new_tokens=8)).ids[1]
    second = first + answer + ids(5, seed=1)
    rows = world.run(body(2, second))
    # 18 tokens, the last of them drawn and not computed: 4 whole pages.
    assert rows.cached[2] == 16
    assert World(prefix_cache=False).run(body(2, second)).ids == rows.ids


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    world = World()
    world.run(body(1, ids(16)))
    assert world.run(body(2, ids(16))).cached[2] == 12
    assert world.run(body(3, ids(17))).cached[3] == 16


def test_prompt_tokens_whose_logprobs_are_wanted_are_computed() -> None:
    world = World()
    world.run(body(1, ids(30)))
    for rid, (start, cached) in enumerate([(0, 0), (9, 8), (8, 4), (30, 28), (-1, 28)], start=2):
        wish = body(rid, ids(30))
        wish.return_logprob, wish.logprob_start_len = True, start
        world.add(wish)
        step = world.scheduler.plan()
        assert step is not None
        assert step.plan.starts.tolist() == [cached]
        world.scheduler.abort(rid)


def test_a_salt_separates() -> None:
    world = World()
    rows = world.run(body(1, ids(20), salt="a"))
    rows = world.run(body(2, ids(20), salt="b"), body(3, ids(20)))
    assert (rows.cached[2], rows.cached[3]) == (0, 0)
    assert world.run(body(4, ids(20), salt="a")).cached[4] == 16


def test_what_was_unused_longest_goes_first_and_from_its_end() -> None:
    world = World(pages=20)
    for rid, seed in ((1, 1), (2, 2), (3, 3)):
        world.run(body(rid, ids(16, seed), max_new_tokens=1))
    world.run(body(4, ids(17, seed=1), max_new_tokens=1))
    assert world.scheduler.state()["pages_cached"] == 12
    # 10 more pages: 8 are free, two of the second prefix go.
    assert world.run(body(5, ids(40, seed=5), max_new_tokens=1)).ends[5].type == "length"
    cached = {
        seed: world.scheduler._batch.memory.cache.matched("", np.array(ids(16, seed), np.int32)) for seed in (1, 2, 3)
    }
    assert cached == {1: 16, 2: 8, 3: 16}


def test_a_flush_leaves_what_is_in_use() -> None:
    world, rows = World(), Rows()
    world.run(body(1, ids(20, seed=1)))
    world.add(body(2, ids(20, seed=2), max_new_tokens=3))
    world.step(rows)
    assert not world.scheduler.flush_cache()
    state = world.scheduler.state()
    assert (state["pages_cached"], state["pages_held"]) == (0, 5)
    drain(world.scheduler, rows, world.runner)
    assert world.scheduler.flush_cache()
    assert world.scheduler.state()["pages_free"] == world.scheduler.config.pages


def test_a_retracted_request_computes_little_again() -> None:
    roomy = World(pages=200)
    bodies = [body(rid, 6 + rid, max_new_tokens=40) for rid in range(8)]
    expected, work = roomy.run(*bodies).ids, roomy.computed
    tight = World(pages=14)
    rows = tight.run(*bodies)
    assert sum(rows.retractions.values()) > 0
    assert rows.ids == expected
    without = World(pages=14, prefix_cache=False)
    assert without.run(*bodies).ids == expected
    assert work < tight.computed < without.computed


def test_a_bad_row_leaves_nothing_behind() -> None:
    world = World()
    world.add(body(1, ids(20)))
    step = world.scheduler.plan()
    assert step is not None
    result = world.runner.run(step.plan)
    result.tokens[:] = -2
    while world.scheduler.state()["running"]:
        world.scheduler.complete(step, result)
        step = world.scheduler.plan() or step
        result.tokens[:] = -2
    state = world.scheduler.state()
    assert (state["live"], state["pages_cached"], state["pages_held"]) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_draw_what_they_would_draw_alone(seed: int) -> None:
    """Shared beginnings, tiny pools, aborts and all policies: every token is what an idle server would have drawn."""
    rng = random.Random(seed)
    stems = [ids(rng.randrange(4, 25), seed=s) for s in range(4)]
    sizes = {"page": rng.choice((1, 3, 4)), "pages": rng.choice((12, 20, 40)), "max_running": rng.choice((2, 8))}
    sizes |= {"policy": rng.choice(("fcfs", "lpm", "priority")), "chunked_prefill_size": rng.choice((3, 9))}
    world, rows = World(**sizes, max_prefill_tokens=rng.choice((9, 40)), max_model_len=64), Rows()
    bodies = []
    for rid in range(60):
        prompt = rng.choice(stems)[: rng.randrange(1, 25)] + ids(rng.randrange(1, 6), seed=rng.randrange(3))
        wish = {"max_new_tokens": rng.randrange(1, 12), "salt": rng.choice((None, "a")), "priority": rng.randrange(3)}
        bodies.append(body(rid, prompt, **wish))
    for wish in bodies:
        world.add(wish)
        world.now += rng.random() * 5
        for _ in range(rng.randrange(3)):
            world.step(rows)
        if rng.random() < 0.2:
            world.scheduler.abort(rng.randrange(wish.rid + 1))
            check_pages(world.scheduler)
    drain(world.scheduler, rows, world.runner)
    alone = World(pages=1000, max_model_len=64, prefix_cache=False).run(*bodies)
    for rid, reason in rows.ends.items():
        assert rows.ids.get(rid, []) == alone.ids[rid][: len(rows.ids.get(rid, []))]
        if reason.type == "length" and alone.prompts[rid] + len(alone.ids[rid]) < world.scheduler.max_tokens:
            assert rows.ids[rid] == alone.ids[rid]
    assert sorted(rows.ends) == list(range(60))


def test_longest_prefix_first() -> None:
    world = World(policy="lpm", max_running=1)
    world.run(body(1, ids(20, seed=1)), body(2, ids(20, seed=2)[:9]))
    asks = {10: ids(20, seed=7), 11: ids(20, seed=2), 12: ids(20, seed=1), 13: ids(20, seed=9)}
    rows = world.run(*(body(rid, prompt, max_new_tokens=1) for rid, prompt in asks.items()))
    assert list(rows.ends) == [12, 11, 10, 13]


def test_priority_first_and_pushing_out_who_is_less_urgent() -> None:
    world, rows = World(policy="priority", max_running=2), Rows()
    world.add(*(body(rid, 6, priority=p, max_new_tokens=20) for rid, p in ((1, 1), (2, 0), (3, 0))))
    assert world.step(rows) == [1, 2]
    world.add(body(4, 6, priority=5, max_new_tokens=2), body(5, 6, priority=1, max_new_tokens=2))
    assert sorted(world.step(rows)) == [1, 4]
    while 4 not in rows.ends:
        world.step(rows)
    assert sorted(world.step(rows)) == [1, 5]
    drain(world.scheduler, rows, world.runner)
    assert list(rows.ends)[:2] == [4, 5]
    assert rows.retractions[2] == 1
    alone = World().run(*(body(rid, 6, max_new_tokens=20) for rid in (1, 2, 3)))
    assert {rid: rows.ids[rid] for rid in (1, 2, 3)} == alone.ids


def test_urgent_prompts_come_before_long_ones_that_have_begun() -> None:
    world, rows = World(policy="priority", max_prefill_tokens=8, chunked_prefill_size=8), Rows()
    world.add(body(1, 60, priority=0))
    world.step(rows)
    world.add(body(2, 8, priority=1, max_new_tokens=1))
    assert world.step(rows) == [2]
    assert 2 in rows.ends


@pytest.mark.parametrize("policy", ["lpm", "priority"])
def test_nobody_starves(policy: str) -> None:
    """A stream of requests that always win lets one that came long before them through."""
    world, rows = World(policy=policy, max_running=1), Rows()
    world.run(body(1, ids(20, seed=1)))
    world.add(body(2, ids(20, seed=2), priority=0, max_new_tokens=6))
    rid = 10
    while 2 not in rows.ends:
        world.add(body(rid, ids(20, seed=1), priority=9, max_new_tokens=2))
        world.step(rows)
        world.now += 1
        rid += 1
        assert world.now < 3 * AGED_S
    assert world.now > AGED_S
    assert len(rows.ids[2]) == 6
    drain(world.scheduler, rows, world.runner)


def test_requests_that_can_never_fit_are_refused_at_once() -> None:
    world, rows = World(pages=6), Rows()
    world.add(body(1, ids(20), max_new_tokens=100))
    world.step(rows)
    world.add(body(2, ids(24)))
    rows.take(world.scheduler.take_batch())
    assert (rows.ends[2].type, rows.ends[2].status) == ("error", 400)
    assert 1 not in rows.ends


def test_entries_of_the_eviction_heap_do_not_pile_up() -> None:
    cache = PrefixCache(2)
    node, _ = cache.extend(cache.root, "", np.arange(8, dtype=np.int32), np.arange(1, 5))
    for _ in range(1000):
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._leaves) < 100
    assert cache.evict(3).tolist() == [2, 3, 4]
    assert (cache.pages, cache.evictable) == (1, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_requests_over_a_pool_that_is_far_too_small() -> None:
    """Random lengths, stops and aborts: all end once and rightly, no page is lost, and memory stays flat."""
    rng, rows = random.Random(1), Rows()
    stems = [ids(rng.randrange(8, 60), seed=s) for s in range(20)]
    world = World(pages=60, max_running=32, max_waiting=20_000, max_model_len=200, chunked_prefill_size=32)
    total, sizes = 10_000, []
    for rid in range(total):
        prompt = rng.choice(stems)[: rng.randrange(1, 60)] + ids(rng.randrange(1, 20), seed=rng.randrange(500))
        stops = [rng.randrange(VOCAB)] if rng.random() < 0.5 else []
        world.add(body(rid, prompt, max_new_tokens=rng.choice((1, 10, 40)), stop_token_ids=stops))
        while world.scheduler.state()["live"] > 100:
            step = world.scheduler.plan()
            assert step is not None
            world.scheduler.complete(step, world.runner.run(step.plan))
            rows.take(world.scheduler.take_batch())
            if rng.random() < 0.1:
                world.scheduler.abort(rng.randrange(max(0, rid - 200), rid + 1))
        if rid % 500 == 0:
            check_pages(world.scheduler)
            cache = world.scheduler._batch.memory.cache
            sizes.append(len(cache._leaves) + cache._nodes)
    drain(world.scheduler, rows, world.runner)
    assert sorted(rows.ends) == list(range(total))
    assert {"stop", "length", "abort"} == {reason.type for reason in rows.ends.values()}
    assert sum(rows.retractions.values()) > 100
    assert max(sizes) < 64 + 5 * 60
