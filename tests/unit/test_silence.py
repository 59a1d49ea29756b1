"""How long control has been silent: only what this process was awake to hear."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from servekit.tokenizer import silence


class World:
    """A clock, and a page whose control process beat last at `beat`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.beat = 100.0
        monkeypatch.setattr(silence, "time", SimpleNamespace(monotonic=lambda: self.now))
        page = SimpleNamespace(control_age=lambda: self.now - self.beat)
        self.silence = silence.ControlSilence(page)  # type: ignore[arg-type]

    def seconds(self, ticks: int) -> float:
        """After as many ticks in time."""
        for _ in range(ticks):
            self.now += 1.0
            self.silence.tick()
        return self.silence.seconds()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_silence_is_counted_while_the_worker_runs(world: World) -> None:
    assert [world.seconds(ticks) for ticks in (2, 5)] == [2.0, 7.0]
    world.beat = world.now
    assert world.silence.seconds() == 0.0


def test_a_worker_that_stood_still_blames_nobody(world: World) -> None:
    world.seconds(2)
    world.now += 60.0
    assert world.silence.seconds() == 0.0, "a request may be looked at before the tick"
    world.silence.tick()
    assert [world.seconds(ticks) for ticks in (0, 3)] == [0.0, 3.0]
