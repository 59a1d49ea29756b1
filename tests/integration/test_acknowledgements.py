"""What a worker has not acknowledged is bounded, and only the worker that is over the bound notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from servekit.messages.batches import BatchStrOutput, FinishReason
from servekit.messages.envelope import Envelope, Kind

from tests.integration.control_world import Worker, make, until

__all__ = ["make"]

PIECE = "x" * 4000
BOUND = 100_000


def acknowledge(worker: Worker, number: int) -> None:
    worker.send(Envelope(Kind.ACK, number))


def row(worker: Worker) -> tuple[int, int, FinishReason | None]:
    """Number of the next frame, and the request and end of its only row."""
    envelope, (body,) = worker.expect(Kind.BATCH_STR)
    batch = msgspec.msgpack.decode(body, type=BatchStrOutput)
    (rid,), reasons = batch.rids, batch.finished_reasons or [None]
    return envelope.seq, rid, reasons[0]


def peer(world: Any, worker: int) -> dict[str, int]:
    return world.state()["workers"][worker]


def test_a_worker_that_reads_but_never_acknowledges_is_cut_at_the_bound(make: Callable[..., Any]) -> None:
    world = make(workers=2, max_unacknowledged=BOUND)
    silent, other = world.workers
    (rank,) = world.ranks
    rid, kept = silent.generate(), other.generate()
    rank.take(), rank.take()
    last, reason = 1, None
    sent = 0
    while sent < 100:
        sent += 1
        rank.step({rid: PIECE})
        number, row_of, reason = row(silent)
        assert row_of == rid
        if reason is not None:
            break
        assert number == last + 1
        last = number
        rank.step({kept: "y"})
        number, row_of, end = row(other)
        assert (row_of, end) == (kept, None)
        acknowledge(other, number)
    assert BOUND // len(PIECE) - 2 < sent < BOUND // len(PIECE) + 2
    assert (reason.type, reason.status) == ("error", 503)
    assert number == last + 2, "the frame that was lost has its number"
    assert rank.expect(Kind.ABORT)[0].id == rid
    rank.finish(rid)
    assert (peer(world, 0)["cuts"], peer(world, 1)["cuts"]) == (1, 0)
    assert peer(world, 0)["unacknowledged_bytes"] <= BOUND * 9 / 8
    until(lambda: peer(world, 1)["unacknowledged_frames"] == 0)
    # What it asks for now ends, too, though it can't be told any more.
    late = silent.generate()
    rank.take()
    for _ in range(5):
        rank.step({late: PIECE})
    assert rank.expect(Kind.ABORT)[0].id == late
    rank.finish(late)
    rank.finish(kept, text="z")
    assert row(other)[1:] == (kept, FinishReason("length"))
    world.assert_empty()


def test_a_slow_worker_that_acknowledges_is_not_cut(make: Callable[..., Any]) -> None:
    world = make(max_unacknowledged=BOUND)
    (worker,), (rank,) = world.workers, world.ranks
    rid = worker.generate()
    rank.take()
    for _ in range(10):
        for _ in range(20):
            rank.step({rid: PIECE})
        until(lambda: peer(world, 0)["unacknowledged_frames"] == 20, world.state)
        number = [row(worker)[0] for _ in range(20)][-1]
        acknowledge(worker, number)
        until(lambda: peer(world, 0)["unacknowledged_bytes"] == 0, world.state)
    rank.finish(rid)
    assert row(worker) == (number + 1, rid, FinishReason("length"))
    assert (peer(world, 0)["cuts"], peer(world, 0)["lost"]) == (0, 0)
    world.assert_empty()


def test_numbers_that_were_never_sent_and_other_lives_acknowledge_nothing(make: Callable[..., Any]) -> None:
    world = make()
    (worker,), (rank,) = world.workers, world.ranks
    rid = worker.generate()
    rank.take()
    rank.step({rid: "x"})
    number = row(worker)[0]
    acknowledge(worker, number + 1)
    worker.send(Envelope(Kind.ACK, number), sender_epoch=2)
    until(lambda: world.state()["counters"]["fenced"] == 1)
    rank.finish(rid)
    row(worker)
    assert peer(world, 0)["unacknowledged_frames"] == 2
    world.assert_empty()
