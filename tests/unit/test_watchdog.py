"""Which ranks the watchdog finds stuck, from what the state page says second by second."""

from __future__ import annotations

from typing import Any

import pytest
from servekit.runtime.watchdog import Watchdog, doing


class Clock:
    """A watchdog of three seconds that looks once a second at one rank."""

    def __init__(self) -> None:
        self.dog = Watchdog(3.0)
        self.now = self.dog._looked

    def look(self, requests: int, beat: int, *, age: float | None = 0.1, after: float = 1.0) -> bool:
        self.now += after
        page: dict[str, Any] = {
            "control": {"age_s": age},
            "ranks": [{"requests": requests, "last_beat_ns": beat}],
        }
        return self.dog.stuck(page, self.now) == [0]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_rank_with_requests_that_is_silent_is_stuck(clock: Clock) -> None:
    assert [clock.look(2, 5) for _ in range(6)] == [False, False, False, True, True, True]
    assert not clock.look(2, 6), "it has said something"


def test_a_rank_that_reports_or_is_idle_is_not(clock: Clock) -> None:
    assert not any(clock.look(1, beat) for beat in range(10))
    assert not any(clock.look(0, 10) for _ in range(10))
    assert [clock.look(1, 10) for _ in range(4)] == [False, False, True, True], "counted from its first request on"


def test_time_in_which_nobody_could_be_heard_does_not_count(clock: Clock) -> None:
    assert not any(clock.look(1, 5, age=age) for age in [0.1, *[9.0] * 10, None])
    assert not clock.look(1, 5, after=100.0), "main itself stood still"
    assert clock.look(1, 5)


def test_it_tells_a_process_that_is_stopped_from_an_engine_that_is_stuck() -> None:
    rank = {"pulse_age_s": 0.1, "phase": "computing", "phase_age_s": 31.2, "step": 12}
    assert doing(rank) == "its process runs; computing for 31 s, step 12"
    assert doing(rank | {"pulse_age_s": 30.9}) == "its process has not run for 31 s; computing for 31 s, step 12"
    assert doing(rank | {"pulse_age_s": None}) == "nothing is known of it"
