"""Control messages from a worker through the control plane to every rank and worker, and back."""

from __future__ import annotations

import msgspec
import pytest
from servekit.messages import requests as r
from servekit.messages.envelope import Envelope, Ext, Kind, party_of_worker

from tests.integration.control_world import Worker, make, until

__all__ = ["make"]


def reply(worker: Worker) -> tuple[int, int, r.ControlReply]:
    """The next reply: correlation id, who answers, and what."""
    envelope, (body,) = worker.expect(Kind.CONTROL_REPLY)
    return envelope.id, envelope.rank, msgspec.msgpack.decode(body, type=r.ControlReply)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Kind.PROFILE, r.ProfileReq(True, "/tmp/traces")),
        (Kind.FLUSH_CACHE, r.FlushCacheReq()),
        (Kind.PAUSE, r.PauseReq()),
        (Kind.CONTINUE, r.ContinueReq()),
    ],
)
def test_what_concerns_the_ranks_reaches_the_active_ones(make, kind, body):
    world = make(workers=2, ranks=3)
    world.plane.set_rank(1, False, "it is down", 0)
    until(lambda: world.page.active_ranks() == [True, False, True])
    worker = world.workers[0]
    asked = worker.mint()
    worker.send(Envelope(kind, asked), body)
    assert reply(worker) == (asked, -1, r.ControlReply(True, asked=[0, 2]))
    for number in (0, 2):
        envelope, (got,) = world.ranks[number].expect(kind)
        assert envelope.id == asked and msgspec.msgpack.decode(got, type=type(body)) == body
        answer = r.ControlReply(number == 0, "" if number == 0 else "no")
        world.ranks[number].send(Envelope(Kind.CONTROL_REPLY, asked, rank=number), answer)
    assert sorted(reply(worker)[1:] for _ in range(2)) == [
        (0, r.ControlReply(True)),
        (2, r.ControlReply(False, "no")),
    ]
    assert world.ranks[1].silent(0.02) and world.workers[1].silent(0.02)


def test_a_log_level_reaches_every_process(make):
    world = make(workers=2)
    (rank,) = world.ranks
    asking, other = world.workers
    asked = asking.mint()
    asking.send(Envelope(Kind.SET_LOG_LEVEL, asked), r.SetLogLevelReq("error"))
    everybody = [0, party_of_worker(0), party_of_worker(1)]
    assert reply(asking) == (asked, -1, r.ControlReply(True, asked=everybody))
    rank.expect(Kind.SET_LOG_LEVEL)
    rank.send(Envelope(Kind.CONTROL_REPLY, asked, rank=0), r.ControlReply(True))
    for worker in (asking, other):
        envelope, (body,) = worker.expect(Kind.SET_LOG_LEVEL)
        assert envelope.id == asked and msgspec.msgpack.decode(body, type=r.SetLogLevelReq).level == "error"
        worker.send(Envelope(Kind.CONTROL_REPLY, asked, rank=party_of_worker(worker.number)), r.ControlReply(True))
    assert sorted(reply(asking)[1] for _ in everybody) == sorted(everybody)
    assert world.plane.log_level == 40
    lines = [line for line in iter(lambda: world.plane.next_log(0.1), None) if line[1] == "log"]
    assert lines == [(20, "log", "the log level is error")]


def test_what_nobody_knows_is_refused_and_goes_nowhere(make):
    world = make()
    (worker,), (rank,) = world.workers, world.ranks
    for kind, body, why in [
        (Kind.KV_EVENT, None, "kind 80"),
        (Kind.ACTIVE_RANKS, r.ActiveRanksOutput([True]), "kind 54"),
        (Kind.SET_LOG_LEVEL, r.SetLogLevelReq("loud"), "no log level"),
    ]:
        asked = worker.mint()
        worker.send(Envelope(kind, asked), body)
        id_, who, answer = reply(worker)
        assert (id_, who, answer.ok, answer.asked) == (asked, -1, False, [])
        assert why in answer.message
    assert rank.silent(0.02)
    # Nobody answers in another's name.
    worker.send(Envelope(Kind.CONTROL_REPLY, worker.mint(), rank=0), r.ControlReply(True))
    until(lambda: world.state()["counters"]["malformed"] == 1)


def test_shared_prompts_find_the_rank_that_has_them(make):
    world = make(ranks=2, load_balance_method="cache_aware", max_queued_tokens=3000)
    (worker,) = world.workers
    hashes = b"".join((n * 0x9E3779B97F4A7C15 & (1 << 64) - 1).to_bytes(8, "little") for n in range(1, 17))
    prefixes = (Ext.PREFIX_HASHES, hashes)
    for _ in range(3):
        rid = worker.generate(prefixes, tokens=1030)
        assert world.ranks[0].take().exts[-1] == prefixes
        world.ranks[0].finish(rid)
        assert worker.end(rid)[1].type == "length"
    # Two prompts that nobody has fill the queue; a third waits for nobody.
    first, second = worker.generate(tokens=1500), worker.generate(tokens=1500)
    taken = [rank.take().id for rank in world.ranks]
    assert set(taken) == {first, second}
    until(lambda: world.page.queued_tokens() == 3000)
    assert worker.end(worker.generate(tokens=1))[1].status == 503
    for rank, rid in zip(world.ranks, taken, strict=True):
        rank.finish(rid)
    assert {worker.rows()[0][0] for _ in range(2)} == {first, second}
    world.assert_empty()
    assert world.state()["kept_bytes"] == 0
