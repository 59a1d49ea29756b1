"""Which rank is said to be late at a start, and where it stood."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from servekit.runtime import loading
from servekit.runtime.launcher import FOLLOWER, SCHEDULER
from servekit.runtime.loading import Loading, LoadingError
from servekit.runtime.progress import Stood

SAYS = {"pulse_age_s": 0.1, "phase": "loading", "phase_age_s": 9.6, "step": 0, "awaits": 0}


def child(role: str, rank: int, *stages: tuple[str, float]) -> Any:
    stood = Stood()
    for stage in stages:
        stood.take(*stage)
    return SimpleNamespace(
        role=role, index=0, rank=rank, title=f"rank {rank}", pid=70 + rank, ready_after=None, stood=stood
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(loading, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def server(*children: Any) -> Any:
    page = SimpleNamespace(snapshot=lambda: {"ranks": [SAYS], "followers": [SAYS]})
    return SimpleNamespace(children=children, state_page=page)


def look(watch: Loading, clock: list[float], seconds: float, of: Any) -> None:
    clock[0] += seconds
    watch.look(of)


def test_who_has_come_least_far_is_named_with_where_it_is(clock: list[float]) -> None:
    leader = child(SCHEDULER, 0, ("modules", 0), ("weights", 0.9))
    follower = child(FOLLOWER, 1, ("modules", 0), ("weights", 0.2), ("weights", 0.4))
    of, watch = server(leader, follower), Loading(3.0)
    for _ in range(2):
        look(watch, clock, 1.0, of)
    with pytest.raises(LoadingError) as error:
        look(watch, clock, 1.1, of)
    assert str(error.value) == (
        "rank 1 (pid 71) has not loaded within 3 s (--load-timeout): it is at weights, 40 % "
        "(its process runs; loading for 10 s); 1 more are not ready"
    )


def test_a_machine_that_stood_still_was_not_slow_and_ranks_that_are_ready_are_in_time(clock: list[float]) -> None:
    rank = child(SCHEDULER, 0)
    of, watch = server(rank, child(SCHEDULER, -1)), Loading(5.0)
    look(watch, clock, 1000.0, of)
    look(watch, clock, 1.0, of)
    rank.ready_after = 1.0
    look(watch, clock, 1000.0, of)
    look(watch, clock, 1000.0, of)
