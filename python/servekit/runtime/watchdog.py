"""Ranks that have work and get no further: their stacks are logged, later they are ended, as if they had died."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from servekit.runtime.launcher import FOLLOWER, SCHEDULER

if TYPE_CHECKING:
    from servekit.runtime.launcher import Process
    from servekit.runtime.supervisor import Server

logger = logging.getLogger("servekit.runtime")

LOOK_EVERY_S = 1.0
STOPPED_S = 2.0
"""A pulse that is older belongs to a process that does not run."""
_RELAYED_NS = 50_000_000
"""By so much a time that stands still may move where another node tells of it."""
_BUSY = ("working", "computing", "waiting")
"""Phases of a rank that has something to do."""


class Member(NamedTuple):
    """A process of a replica.

    Attributes:
        name: its own among all.
        says: what a snapshot of the state page shows of it.
    """

    name: str
    says: dict[str, Any]


@dataclass(slots=True)
class _Signs:
    """What was last seen of a process, and for how long that has stayed so, in seconds."""

    pulse: int = -_RELAYED_NS
    moved: int = -_RELAYED_NS
    stopped_s: float = 0.0
    still_s: float = 0.0

    def see(self, says: dict[str, Any], seconds: float) -> None:
        self.stopped_s, self.still_s = self.stopped_s + seconds, self.still_s + seconds
        if abs(says["pulse_ns"] - self.pulse) > _RELAYED_NS:
            self.pulse, self.stopped_s = says["pulse_ns"], 0.0
        if abs(says["moved_ns"] - self.moved) > _RELAYED_NS:
            self.moved, self.still_s = says["moved_ns"], 0.0


@dataclass(slots=True)
class Hangs:
    """Finds the processes of replicas that get no further, from what they say second by second.

    A process is stopped when its pulse stays away. A replica is stuck when none of its processes that have something to
    do gets ahead, by a layer, a message or a step: while one stage computes, the next one rightly waits. An idle one is
    neither. Time in which the caller itself did not run does not count: a machine that stood still has no culprit.
    """

    looked: float
    _signs: dict[str, _Signs] = field(default_factory=dict)

    def see(self, members: Sequence[Member], now: float) -> None:
        """Look at all processes.

        Args:
            members: those of all replicas.
            now: monotonic seconds.
        """
        seconds, self.looked = min(now - self.looked, 2 * LOOK_EVERY_S), now
        for member in members:
            self._signs.setdefault(member.name, _Signs()).see(member.says, seconds)

    def of(self, replica: Sequence[Member], requests: int, timeout_s: float) -> list[Member]:
        """Processes of a replica that have got no further for that long, the likeliest culprit first.

        Args:
            requests: how many the replica has.
        """
        stopped = [each for each in replica if requests and self._signs[each.name].stopped_s >= timeout_s]
        busy = [each for each in replica if each.says["phase"] in _BUSY and each not in stopped]
        if any(self._signs[each.name].still_s < timeout_s for each in busy):
            busy = []
        return stopped + sorted(busy, key=lambda each: (_waits(each.says), int(each.says["moved_ns"])))


def _waits(says: dict[str, Any]) -> bool:
    return bool(says["awaits"]) or says["phase"] == "waiting"


class Watchdog:
    """Judges ranks by the state page.

    Args:
        soft_s: how long a rank with work may get no further before its stacks are logged.
        hard_s: how long before it is ended, and its replica with it.
    """

    def __init__(self, soft_s: float, hard_s: float) -> None:
        self._soft_s, self._hard_s = soft_s, hard_s
        self._hangs = Hangs(time.monotonic())
        self._told: dict[str, float] = {}

    def look(self, server: Server) -> None:
        """To be called about every `LOOK_EVERY_S` seconds: one rank at a time writes its stacks, or ends after that."""
        now = time.monotonic()
        if now - self._hangs.looked < LOOK_EVERY_S / 2:
            return
        page = server.state_page.snapshot()
        replicas = list(_replicas(server, page))
        self._hangs.see([member for members, _, _ in replicas for member in members], now)
        for members, children, requests in replicas:
            soft, hard = (self._hangs.of(members, requests, limit) for limit in (self._soft_s, self._hard_s))
            names = {each.name for each in (*soft, *hard)}
            for gone in [name for name in self._told if name in children and name not in names]:
                del self._told[gone]
            if hard and self._told.get(hard[0].name) == self._hard_s:
                children[hard[0].name].kill()
            elif hard:
                self._tell(children[hard[0].name], hard[0], self._hard_s, "; it ends, and its replica with it")
            elif new := [member for member in soft if member.name not in self._told]:
                # The others at the next looks: two that write at once can't be read.
                self._tell(children[new[0].name], new[0], self._soft_s, "")

    def _tell(self, child: Process, member: Member, limit_s: float, ends: str) -> None:
        self._told[member.name] = limit_s
        logger.error(
            "%s (pid %d) has work and has got no further for %g s (%s)%s",
            child.title,
            child.pid,
            limit_s,
            doing(member.says),
            ends,
        )
        # A stopped process would write them when it is no longer of interest.
        if member.says["pulse_age_s"] is not None and member.says["pulse_age_s"] <= STOPPED_S:
            child.write_stacks()


def _replicas(server: Server, page: dict[str, Any]) -> Iterator[tuple[list[Member], dict[str, Process], int]]:
    """Of each replica its living ranks, as `Member`s and as children by name, and how many requests it has."""
    living = [*server.of(SCHEDULER), *server.of(FOLLOWER)]
    for replica in sorted({server.ranks[child.rank].replica for child in living} - server.lost):
        children = {child.title: child for child in living if server.ranks[child.rank].replica == replica}
        members = [Member(name, says_of(page, child)) for name, child in children.items()]
        yield members, children, sum(member.says.get("requests", 0) for member in members)


def says_of(page: dict[str, Any], child: Process) -> dict[str, Any]:
    """What a rank's process says of itself.

    Args:
        page: a snapshot of the state page.
        child: a leader or a follower.
    """
    says: dict[str, Any] = page["ranks" if child.role == SCHEDULER else "followers"][child.index]
    return says


def doing(says: dict[str, Any]) -> str:
    """What a rank last said of itself, in words.

    Args:
        says: what a snapshot of the state page shows of it.
    """
    if says["pulse_age_s"] is None or says["phase_age_s"] is None:
        return "nothing is known of it"
    stopped = says["pulse_age_s"] > STOPPED_S
    runs = f"its process has not run for {says['pulse_age_s']:.0f} s" if stopped else "its process runs"
    step = f", step {says['step']}" if says["step"] else ""
    awaits = ", waits for its group" if says["awaits"] else ""
    return f"{runs}; {says['phase']} for {says['phase_age_s']:.0f} s{step}{awaits}"
