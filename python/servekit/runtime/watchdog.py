"""Ranks that have requests and say nothing: they are ended, and what follows is what follows a death."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from servekit.runtime.launcher import SCHEDULER

if TYPE_CHECKING:
    from servekit.runtime.supervisor import Server

logger = logging.getLogger("servekit.runtime")

LOOK_EVERY_S = 1.0
STOPPED_S = 2.0
"""A pulse that is older belongs to a process that does not run."""
CONTROL_SILENCE_S = 2.0
"""Control hears the ranks: while it is silent itself, nothing can be said of them."""


class Watchdog:
    """Judges ranks by the state page. An idle rank is silent by right; one that computes or waits reports.

    Time in which main itself or control did not run does not count: a machine that stood still has no culprit.

    Args:
        timeout_s: how long a rank with requests may be silent.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._looked = time.monotonic()
        self._silent: dict[int, tuple[int, float]] = {}
        self._asked: set[int] = set()

    def look(self, server: Server) -> None:
        """To be called about every `LOOK_EVERY_S` seconds: first asks a stuck rank for its stacks, then kills it."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S / 2:
            return
        page = server.state_page.snapshot()
        stuck = self.stuck(page, now)
        self._asked.intersection_update(stuck)
        for child in server.of(SCHEDULER):
            if child.index not in stuck:
                continue
            if child.index in self._asked:
                child.kill()
                continue
            self._asked.add(child.index)
            logger.error(
                "%s (pid %d) has requests and has said nothing for %g s (%s): it may write its stacks, then it ends",
                child.title,
                child.pid,
                self._timeout_s,
                doing(page["ranks"][child.index]),
            )
            # Its group's too: a leader is silent when a follower is stuck.
            for each in server.group_of(child):
                each.write_stacks()

    def stuck(self, page: dict[str, Any], now: float) -> list[int]:
        """Ranks that have been silent for too long.

        Args:
            page: a snapshot of the state page.
            now: monotonic seconds.
        """
        passed, self._looked = now - self._looked, now
        age = page["control"]["age_s"]
        counted = min(passed, 2 * LOOK_EVERY_S) if age is not None and age < CONTROL_SILENCE_S else 0.0
        for number, rank in enumerate(page["ranks"]):
            beat, silent = self._silent.get(number, (-1, 0.0))
            if not rank["requests"] or rank["last_beat_ns"] != beat:
                self._silent[number] = (rank["last_beat_ns"], 0.0)
            else:
                self._silent[number] = (beat, silent + counted)
        return [number for number, (_, silent) in self._silent.items() if silent >= self._timeout_s]


def doing(rank: dict[str, Any]) -> str:
    """What a rank last said of itself, in words.

    Args:
        rank: what a snapshot of the state page shows of it.
    """
    if rank["pulse_age_s"] is None or rank["phase_age_s"] is None:
        return "nothing is known of it"
    stopped = rank["pulse_age_s"] > STOPPED_S
    runs = f"its process has not run for {rank['pulse_age_s']:.0f} s" if stopped else "its process runs"
    return f"{runs}; {rank['phase']} for {rank['phase_age_s']:.0f} s, step {rank['step']}"
