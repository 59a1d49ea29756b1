"""A long prompt takes its time beside requests that decode, and nobody else's."""

import itertools

import pytest
from servekit.engine.dummy_runner import DummyRunner
from servekit.scheduler.pace import LEAST, SHORT, STRETCH, UNKNOWN, Pace
from servekit.scheduler.scheduler import Scheduler

from tests.unit.scheduler_world import Rows, body, config

LONG = 2000


class World:
    """A scheduler whose steps take 50 ms and 1 ms for each token of a prompt."""

    def __init__(self) -> None:
        self.now = 0.0
        sizes = {"max_prefill_tokens": 4096, "chunked_prefill_size": 512, "pages": 2000, "max_model_len": 4096}
        self.scheduler = Scheduler(config(**sizes), lambda: self.now)
        self.runner = DummyRunner(97)
        self.rows = Rows()

    def step(self) -> float:
        """Seconds that a step takes; 0 if there is none."""
        step = self.scheduler.plan()
        if step is None:
            return 0.0
        result = self.runner.collect(self.runner.launch(step.plan))
        took = 0.05 + 0.001 * int(step.plan.counts[step.decoded :].sum())
        self.now += took
        self.scheduler.complete(step, result)
        self.rows.take(self.scheduler.take_batch())
        return took


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_steps_stretch_for_short_prompts_alone(length: int) -> None:
    world = World()
    world.scheduler.add(1, body(1, 8, max_new_tokens=1000))
    for _ in range(20):
        world.step()
    world.scheduler.add(2, body(2, length, max_new_tokens=1))
    took = []
    while 2 not in world.rows.ends:
        took.append(world.step())
    if length == SHORT:
        assert len(took) == 1
    else:
        # The first steps do not know yet what a token costs.
        assert max(took) <= 0.05 + 0.001 * UNKNOWN
        assert max(took[20:]) < 0.05 * (STRETCH + 0.1)
        assert len(took) > LONG / UNKNOWN


def test_alone_a_long_prompt_is_as_fast_as_it_can_be() -> None:
    world = World()
    world.scheduler.add(1, body(1, LONG, max_new_tokens=1))
    took = list(itertools.takewhile(bool, iter(world.step, None)))
    assert len(took) == -(-LONG // 512)


def test_tokens_follow_what_steps_took() -> None:
    pace = Pace()
    assert pace.tokens == UNKNOWN
    for _ in range(50):
        pace.step_took(0.1, 8, 0)
        pace.step_took(0.3, 8, 100)
    assert pace.tokens == pytest.approx((STRETCH - 1) * 50, abs=1)
    for _ in range(50):
        pace.step_took(0.001, 8, 0)
        pace.step_took(0.3, 8, 100)
    assert pace.tokens == LEAST
    # A clock that stands still teaches nothing.
    pace.step_took(0.0, 8, 100)
    assert pace.tokens == LEAST
