"""A rank's pulse: it needs no GIL, and what it stands beside tells a stuck engine from a process that is gone."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servekit import _core

# A call through PyDLL keeps the GIL.
STUCK = (
    "import ctypes, sys; from servekit import _core; pulse = _core.Pulse(sys.argv[1], 1, 7);"
    "pulse.enter('computing', 3); print('stuck', flush=True); ctypes.PyDLL(None).sleep(60)"
)


@pytest.fixture
def page() -> Iterator[_core.StatePage]:
    page = _core.StatePage.create(f"servekit-test-{os.getpid()}-{time.monotonic_ns()}", 1, 2)
    yield page
    page.unlink()
    page.close()


def rank(page: _core.StatePage) -> dict[str, Any]:
    found: dict[str, Any] = page.snapshot()["ranks"][1]
    return found


def until(met: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not met():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_it_beats_while_somebody_keeps_the_gil(page: _core.StatePage) -> None:
    before = rank(page)
    assert (before["phase"], before["pulse_age_s"], before["phase_age_s"]) == ("unknown", None, None)
    child = subprocess.Popen([sys.executable, "-c", STUCK, page.name], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "stuck\n"
        beats, since = set(), rank(page)["phase_since_ns"]

        def beaten() -> bool:
            beats.add(rank(page)["pulse_ns"])
            return len(beats) >= 4

        until(beaten, "it does not beat")
        now = rank(page)
        assert (now["pulse_epoch"], now["phase"], now["step"], now["phase_since_ns"]) == (7, "computing", 3, since)
        # Two whole times between beats have passed since then.
        assert now["phase_age_s"] > 0.35
        child.send_signal(signal.SIGSTOP)
        until(lambda: rank(page)["pulse_age_s"] > 0.5, "a stopped process beats")
        child.kill()
    assert page.snapshot()["ranks"][0]["phase"] == "unknown"


def test_it_says_what_the_engine_does(page: _core.StatePage) -> None:
    pulse = _core.Pulse(page.name, 1, 1)
    for step, phase in enumerate(("loading", "idle", "working", "computing")):
        pulse.enter(phase, step)
        now = rank(page)
        assert (now["phase"], now["step"]) == (phase, step)
        assert 0 <= now["phase_age_s"] < 10
    with pytest.raises(_core.SettingError, match='unknown phase of a rank "asleep"'):
        pulse.enter("asleep", 1)
    with pytest.raises(_core.SettingError, match="rank 2: there are 2"):
        _core.Pulse(page.name, 2, 1)
    with pytest.raises(_core.ResourceError):
        _core.Pulse("servekit-test-no-such-page", 0, 1)
    pulse.close()
    pulse.close()


def test_nobody_beats_behind_its_end(page: _core.StatePage) -> None:
    before = threads()
    pulses = [_core.Pulse(page.name, 0, 1), _core.Pulse(page.name, 1, 1)]
    assert threads() == before + 2
    pulses[0].close()
    assert threads() == before + 1
    pulses.clear()
    gc.collect()
    until(lambda: threads() == before, "the thread of a pulse that is gone goes on")
