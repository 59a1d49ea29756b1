"""Which ranks the watchdog finds stuck, from what the state page says second by second, and what it does about them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from servekit.runtime import watchdog
from servekit.runtime.launcher import FOLLOWER, SCHEDULER
from servekit.runtime.watchdog import Hangs, Member, Watchdog, doing

S = 1_000_000_000
"""Nanoseconds."""


class Group:
    """Three processes of one replica that are looked at once a second, with a limit of three seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.hangs = Hangs(self.now)
        self.page: dict[str, dict[str, Any]] = {
            name: {"phase": "idle", "pulse_ns": S, "moved_ns": S * order, "awaits": 0}
            for order, name in enumerate("abc", 1)
        }

    def look(self, *, after: float = 1.0, requests: int = 1, pulse: str = "abc", **says: tuple[str, int]) -> list[str]:
        """Names of those that are stuck.

        Args:
            after: seconds since the last look.
            pulse: whose process runs.
            says: phase and progress of each that has changed.
        """
        self.now += after
        for name, page in self.page.items():
            page["pulse_ns"] += S * (name in pulse)
            if name in says:
                page["phase"], page["moved_ns"] = says[name][0], S * says[name][1]
        members = [Member(name, page) for name, page in self.page.items()]
        self.hangs.see(members, self.now)
        return [each.name for each in self.hangs.of(members, requests, 3.0)]


@pytest.fixture
def group() -> Group:
    return Group()


def test_a_replica_none_of_whose_ranks_gets_further_is_stuck_and_who_came_least_far_is_first(group: Group) -> None:
    assert group.look(a=("computing", 31), b=("computing", 30), c=("computing", 32)) == []
    assert [group.look() for _ in range(4)] == [[], [], ["b", "a", "c"], ["b", "a", "c"]]
    group.page["b"]["awaits"] = 1
    assert group.look() == ["a", "c", "b"], "who waits for the others did not keep them waiting"
    assert group.look(c=("computing", 33)) == [], "one layer further"


def test_while_one_stage_computes_those_that_wait_for_it_are_not(group: Group) -> None:
    group.look(a=("computing", 10), b=("waiting", 9), c=("computing", 8))
    assert all(group.look(a=("computing", 11 + i)) == [] for i in range(10))


def test_who_has_nothing_to_do_is_not(group: Group) -> None:
    assert all(group.look(requests=2) == [] for _ in range(10))
    group.look(a=("computing", 10))
    assert [group.look() for _ in range(3)][-1] == ["a"], "the others rest"


def test_a_process_that_does_not_run_is_stuck_if_its_replica_has_requests(group: Group) -> None:
    assert all(group.look(requests=0, pulse="ab") == [] for _ in range(10))
    assert group.look(requests=1, pulse="ab", a=("computing", 10)) == ["c"]
    assert group.look(requests=1, pulse="ab", a=("computing", 11)) == ["c"], "whoever gets ahead does so without it"
    assert group.look() == [], "it runs again"


def test_time_in_which_main_itself_stood_still_does_not_count(group: Group) -> None:
    group.look(a=("computing", 10), pulse="")
    assert group.look(pulse="", after=1000.0) == []
    assert group.look(pulse="", after=0.9) == []
    assert group.look(pulse="", after=0.2) == ["a", "b", "c"]


def test_a_time_that_another_node_tells_of_stands_still_but_for_how_long_its_message_took(group: Group) -> None:
    group.look(a=("computing", 10))
    for late_ns in (900_000, 100_000, 2_000_000):
        group.page["a"]["moved_ns"] = 10 * S + late_ns
        found = group.look()
    assert found == ["a"]


def test_it_tells_a_process_that_is_stopped_from_an_engine_that_is_stuck() -> None:
    rank = {"pulse_age_s": 0.1, "phase": "computing", "phase_age_s": 31.2, "step": 12, "awaits": 0}
    assert doing(rank) == "its process runs; computing for 31 s, step 12"
    assert doing(rank | {"pulse_age_s": 30.9}) == "its process has not run for 31 s; computing for 31 s, step 12"
    assert doing(rank | {"awaits": 1}) == "its process runs; computing for 31 s, step 12, waits for its group"
    assert doing(rank | {"phase": "loading", "step": 0}) == "its process runs; loading for 31 s"
    assert doing(rank | {"pulse_age_s": None}) == "nothing is known of it"


class Child:
    """What the watchdog knows of a rank, and what it did to it."""

    def __init__(self, role: str, place: int) -> None:
        self.role, self.index, self.rank = role, 0, place
        self.title, self.pid = f"rank {place}", 50 + place
        self.done: list[str] = []
        self.says = {"phase": "computing", "phase_age_s": 9.0, "step": 3, "pulse_age_s": 0.1}
        self.says |= {
            "pulse_ns": S,
            "moved_ns": S * (7 - place),
            "requests": 1 if role == SCHEDULER else 0,
            "awaits": 0,
        }

    def write_stacks(self) -> None:
        self.done.append("stacks")

    def kill(self) -> None:
        self.done.append("kill")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watchdog that logs after 3 s and kills after 6 s, over a leader and a follower; plays so many seconds."""
    now = [100.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    leader, follower = Child(SCHEDULER, 0), Child(FOLLOWER, 1)
    server: Any = SimpleNamespace(
        state_page=SimpleNamespace(snapshot=lambda: {"ranks": [leader.says], "followers": [follower.says]}),
        of=lambda role: [leader] if role == SCHEDULER else [follower],
        ranks=[SimpleNamespace(replica=0)] * 2,
        lost=set(),
    )
    dog = Watchdog(3.0, 6.0)

    def play(count: int, moves: bool = False) -> tuple[list[str], list[str]]:
        for each in (leader, follower):
            each.done.clear()
        for _ in range(count):
            now[0] += 1.0
            for each in (leader, follower):
                each.says["pulse_ns"] += S
                each.says["moved_ns"] += S * moves
            dog.look(server)
        return leader.done[:], follower.done[:]

    play.follower = follower  # type: ignore[attr-defined]
    return play


def test_a_hang_is_told_once_and_ends_with_the_death_of_who_came_least_far(
    seconds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    assert seconds(3) == ([], [])
    assert seconds(1) == ([], ["stacks"])
    assert seconds(1) == (["stacks"], []), "one after the other"
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 (pid 51) has work and has got no further for 3 s (its process runs; computing for 9 s, step 3)",
        "rank 0 (pid 50) has work and has got no further for 3 s (its process runs; computing for 9 s, step 3)",
    ]
    assert seconds(1) == ([], [])
    assert seconds(1) == ([], ["stacks"])
    assert "has got no further for 6 s" in caplog.text and "it ends, and its replica with it" in caplog.text
    assert seconds(1) == ([], ["kill"])


def test_a_second_hang_is_told_again(seconds: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert seconds(5) == (["stacks"], ["stacks"])
    assert seconds(1, moves=True) == ([], [])
    assert seconds(4) == (["stacks"], ["stacks"])
    assert len(caplog.records) == 4


def test_a_stopped_process_is_not_asked_for_its_stacks(seconds: Any, caplog: pytest.LogCaptureFixture) -> None:
    seconds.follower.says["pulse_age_s"] = 4.4
    assert seconds(5) == (["stacks"], [])
    assert "rank 1 (pid 51) has work and has got no further for 3 s (its process has not run for 4 s;" in caplog.text
