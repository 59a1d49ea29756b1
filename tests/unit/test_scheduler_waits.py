"""How long a request waited for its first step is told with its first token and with its last, by the torch engine."""

from __future__ import annotations

from servekit.messages.batches import QUEUE_TIME
from servekit.scheduler.scheduler import Scheduler

from tests.unit.scheduler_world import Scripted, body, config


def test_waits_are_told_with_the_first_token_and_the_last() -> None:
    now = [100.0]
    scheduler = Scheduler(config(max_running=1), clock=lambda: now[0])
    runner = Scripted([7] * 10)
    for rid in (1, 2):
        scheduler.add(rid, body(rid, 3, max_new_tokens=3))
    told: dict[int, list[float | None]] = {1: [], 2: []}
    now[0] += 2.0
    while (step := scheduler.plan()) is not None:
        scheduler.complete(step, runner.run(step.plan))
        now[0] += 1.0
        batch = scheduler.take_batch()
        assert batch is not None
        for row, rid in enumerate(batch.rids):
            told[rid].append(batch.time_stats[QUEUE_TIME][row] if batch.time_stats else None)
    assert told == {1: [2.0, None, 2.0], 2: [5.0, None, 5.0]}
