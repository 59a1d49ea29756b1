"""The control plane alone, with bare sockets as HTTP workers and ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from servekit import _core
from servekit.messages import requests as r
from servekit.messages.batches import FinishReason
from servekit.messages.envelope import (
    FLAG_STREAM,
    Envelope,
    Group,
    Kind,
    Load,
    TextOptions,
    encode_envelope,
    group_ext,
    mint_rid,
    name_exts,
    text_ext,
)

from tests.integration.control_world import WAIT_S, Rank, Worker, encode, make, until

__all__ = ["make"]


def test_a_request_becomes_text(make):
    world = make()
    (worker,), (rank,) = world.workers, world.ranks
    rid = worker.generate()
    assert rank.take().id == rid
    until(lambda: world.page.snapshot()["control"]["in_flight"] == 1)
    rank.step({rid: "he"}, load=Load(running=1, held_tokens=5))
    assert worker.rows() == [(rid, "he", None)]
    until(lambda: world.page.snapshot()["ranks"][0]["held_tokens"] == 5)
    assert world.state()["ranks"][0]["tokens"] == 5
    rank.finish(rid, text="llo")
    assert worker.rows() == [(rid, "llo", FinishReason("length"))]
    world.assert_empty()
    assert world.page.snapshot()["ranks"][0]["dispatched"] == 1


def test_text_comes_once_when_the_client_does_not_stream(make):
    world = make()
    (worker,), (rank,) = world.workers, world.ranks
    rid = worker.generate(flags=0)
    rank.take()
    rank.step({rid: "one"})
    rank.step({rid: " two"})
    assert worker.silent()
    rank.finish(rid)
    assert worker.rows() == [(rid, "one two", FinishReason("length"))]
    world.assert_empty()


def test_frames_reach_the_rank_as_they_were_sent(make):
    world = make()
    (worker,), (rank,) = world.workers, world.ranks
    rid = worker.mint()
    unknown = (4000, b"kept")
    envelope = Envelope(Kind.GENERATE, rid, FLAG_STREAM, tokens=3, exts=[text_ext(TextOptions()), unknown])
    worker.send(envelope, ["a body that no router reads"], b"attachment" * 1000)
    got, (body, attachment) = rank.expect(Kind.GENERATE)
    assert got.exts == envelope.exts and body == encode(["a body that no router reads"])
    assert attachment == b"attachment" * 1000


def test_every_worker_gets_its_own_rows_in_one_message(make):
    world = make(workers=3, detokenizer_workers=1)
    rids = [[worker.generate() for _ in range(4)] for worker in world.workers]
    (rank,) = world.ranks
    taken = {rank.take().id for _ in range(12)}
    assert taken == {rid for mine in rids for rid in mine}
    rank.step(dict.fromkeys(taken, "x"))
    for worker, mine in zip(world.workers, rids, strict=True):
        assert sorted(worker.rows()) == [(rid, "x", None) for rid in mine]
        assert worker.silent(0.02)
    rank.finish(*taken)


def test_streams_over_shards_keep_their_order(make):
    world = make(workers=2, ranks=2, detokenizer_workers=3, load_balance_method="total_requests")
    live = {worker.generate(): worker for worker in world.workers for _ in range(16)}
    taken = [[rank.take().id for _ in range(16)] for rank in world.ranks]
    assert all(taken), "both ranks work"
    for character in "abcdefgh":
        for rank, mine in zip(world.ranks, taken, strict=True):
            rank.step(dict.fromkeys(mine, character))
    for rank, mine in zip(world.ranks, taken, strict=True):
        rank.finish(*mine, text="!")
    texts, ended = dict.fromkeys(live, ""), set()
    for worker in world.workers:
        while len(ended & {rid for rid in live if live[rid] is worker}) < 16:
            for rid, piece, reason in worker.rows():
                assert live[rid] is worker and rid not in ended
                texts[rid] += piece
                if reason:
                    ended.add(rid)
    assert set(texts.values()) == {"abcdefgh!"}
    world.assert_empty()


def test_an_abort_reaches_the_rank_at_once(make):
    world = make()
    (worker,), (rank,) = world.workers, world.ranks
    rid = worker.generate()
    rank.take()
    worker.abort(rid)
    worker.abort(rid)
    envelope, (body,) = rank.expect(Kind.ABORT)
    assert envelope.id == rid and msgspec.msgpack.decode(body, type=r.AbortReq) == r.AbortReq(rid)
    rank.step({rid: ""}, {rid: FinishReason("abort")})
    assert worker.rows() == [(rid, "", FinishReason("abort"))]
    worker.abort(rid)
    worker.abort(worker.mint())
    assert rank.silent()
    world.assert_empty()


def test_a_stop_string_ends_the_request_before_its_rank_does(make):
    world = make()
    (worker,), (rank,) = world.workers, world.ranks
    rid = worker.generate(text=TextOptions(stops=("lo w",)))
    rank.take()
    rank.step({rid: "hello "})
    rank.step({rid: "world"})
    text, reason = worker.end(rid)
    assert (text, reason.type, reason.matched) == ("hel", "stop", "lo w")
    assert rank.expect(Kind.ABORT)[0].id == rid
    rank.step({rid: "more"})
    rank.step({rid: ""}, {rid: FinishReason("abort")})
    rank.step({rid: ""}, {rid: FinishReason("abort")})
    assert worker.silent()
    world.assert_empty()


def test_a_rank_that_the_client_names(make):
    world = make(ranks=2)
    (worker,) = world.workers
    rids = [worker.generate(rank=1) for _ in range(3)]
    assert [world.ranks[1].take().id for _ in rids] == rids
    assert world.ranks[0].silent()
    rid = worker.generate(rank=7)
    assert worker.end(rid)[1] == FinishReason("error", message="rank 7 does not exist, there are 2", status=400)
    world.plane.set_rank(1, False, "killed by signal 9", 0)
    ended = {rid for _ in rids for rid, _, reason in worker.rows() if reason.status == 503}
    assert ended == set(rids)
    rid = worker.generate(rank=1)
    assert "killed by signal 9" in (worker.end(rid)[1].message or "")
    world.assert_empty()


def test_choices_of_one_prompt_go_to_one_rank(make):
    world = make(ranks=3)
    (worker,) = world.workers
    rids = [worker.generate(group_ext(Group(9, index, 6, index // 3))) for index in range(6)]
    homes = {rid: rank.number for rank in world.ranks for rid in iter_taken(rank)}
    assert [homes[rid] for rid in rids] == [homes[rids[0]]] * 3 + [homes[rids[3]]] * 3
    assert homes[rids[0]] != homes[rids[3]]
    assert world.state()["open_groups"] == 0


def iter_taken(rank: Rank) -> Iterator[int]:
    while not rank.silent():
        yield rank.take().id


def test_requests_wait_for_a_rank_and_no_longer_than_told(make):
    world = make(up=False, rank_wait_timeout=1.0)
    (worker,) = world.workers
    began = time.monotonic()
    expired = worker.generate()
    text, reason = worker.end(expired)
    assert (text, reason.status) == ("", 503)
    assert time.monotonic() - began >= 1.0
    patient = worker.generate()
    until(lambda: world.state()["waiting_for_rank"] == 1)
    world.bring_up(0)
    assert world.ranks[0].take().id == patient
    world.ranks[0].finish(patient)
    worker.end(patient)
    world.assert_empty()


def test_a_full_server_refuses(make):
    world = make(up=False, max_queued_requests=2)
    (worker,) = world.workers
    worker.generate()
    worker.generate()
    refused = worker.generate()
    text, reason = worker.end(refused)
    assert (text, reason.type, reason.status) == ("", "error", 503)
    assert until(lambda: world.page.snapshot()["control"]["refused"] == 1)


def test_what_is_malformed_is_counted_and_nobody_else_notices(make):
    world = make()
    (worker,), (rank,) = world.workers, world.ranks
    for frames in ([b""], [b"x" * 64, b""], [b"\0" * 40], [encode_envelope(Envelope(Kind.GENERATE, 1))]):
        worker.push.send_multipart(frames)
        rank.push.send_multipart(frames)
    worker.send(Envelope(Kind.KV_EVENT, worker.mint()))
    worker.send(Envelope(Kind.ACTIVE_RANKS, worker.mint()), r.ActiveRanksOutput([False]))
    rank.send(Envelope(Kind.GENERATE, 5))
    rank.send(Envelope(Kind.ACTIVE_RANKS), [1])
    worker.send(Envelope(Kind.ABORT, mint_rid(5, 1, 1)))
    worker.send(Envelope(Kind.ABORT, 1), sender=9)
    until(lambda: world.state()["counters"]["malformed"] == 10, world.state)
    counters = world.state()["counters"]
    assert (counters["unknown"], counters["forged"]) == (3, 1)
    rid = worker.generate()
    assert rank.take().id == rid
    lines = iter(lambda: world.plane.next_log(0.0), None)
    warnings = [text for level, thread, text in lines if level == 30 and thread == "router"]
    assert len(warnings) == 4, warnings


def test_frames_of_another_life_are_fenced(make):
    world = make()
    (worker,), (rank,) = world.workers, world.ranks
    rid = worker.generate()
    rank.take()
    worker.send(Envelope(Kind.ABORT, rid), receiver_epoch=2)
    worker.send(Envelope(Kind.ABORT, rid), sender_epoch=2)
    worker.send(Envelope(Kind.ABORT, rid), seq=1)
    until(lambda: world.page.snapshot()["control"]["fenced"] == 2)
    assert rank.silent()
    assert world.state()["counters"]["replayed"] == 1


def test_a_broken_batch_ends_its_requests_with_an_error(make):
    world = make()
    (worker,), (rank,) = world.workers, world.ranks
    rid = worker.generate()
    rank.take()
    rank.send(Envelope(Kind.BATCH_TOKEN_ID, rank=0, rows=1), ["BatchTokenIDOutput", [rid], 7])
    text, reason = worker.end(rid)
    assert (text, reason.type, reason.status) == ("", "error", 500)
    assert rank.expect(Kind.ABORT)[0].id == rid
    rank.step({}, load=Load())
    world.assert_empty()


def test_control_messages_reach_every_rank_and_replies_their_worker(make):
    world = make(workers=2, ranks=2)
    worker = world.workers[1]
    asked = worker.mint()
    worker.send(Envelope(Kind.GET_STATE, asked), r.GetStateReq())
    envelope, (body,) = worker.expect(Kind.CONTROL_REPLY)
    reply = msgspec.msgpack.decode(body, type=r.ControlReply)
    assert (envelope.id, envelope.rank, reply.ok, reply.asked) == (asked, -1, True, [0, 1])
    assert json.loads(reply.data)["ranks"][1]["active"]
    for rank in world.ranks:
        got, (body,) = rank.expect(Kind.GET_STATE)
        assert got.id == asked and msgspec.msgpack.decode(body, type=r.GetStateReq) == r.GetStateReq()
        rank.send(Envelope(Kind.CONTROL_REPLY, asked, rank=rank.number), r.ControlReply(True, data=b"{}"))
    replies = [worker.expect(Kind.CONTROL_REPLY)[0] for _ in world.ranks]
    assert sorted(reply.rank for reply in replies) == [0, 1]
    assert {reply.id for reply in replies} == {asked}
    assert world.workers[0].silent(0.02)


def test_a_worker_that_is_gone_loses_its_requests_and_a_new_one_joins(make):
    world = make(workers=2)
    gone, other = world.workers
    (rank,) = world.ranks
    rid, kept = gone.generate(), other.generate()
    rank.take(), rank.take()
    gone.close()
    world.plane.worker_down(0)
    assert rank.expect(Kind.ABORT)[0].id == rid
    rank.step({rid: "", kept: "on"}, {rid: FinishReason("abort")})
    assert other.rows() == [(kept, "on", None)]
    until(lambda: world.state()["workers"][0]["unroutable"] == 1)
    world.workers[0] = Worker(world.run_dir, 0, epoch=2)
    again = world.workers[0].generate()
    assert rank.take().id == again
    rank.finish(again, kept, text="!")
    assert world.workers[0].end(again)[0] == "!"


def test_a_worker_that_does_not_read_is_cut_and_the_others_go_on(make):
    world = make(workers=2)
    slow, quick = world.workers
    (rank,) = world.ranks
    rid, kept = slow.generate(), quick.generate()
    rank.take(), rank.take()
    # The sockets hold some of it; then the pipe to the slow one is full.
    piece, sent = "x" * 4000, 0
    while not world.state()["workers"][0]["cuts"]:
        for _ in range(1024):
            rank.step({rid: piece})
        rank.step({kept: "y"})
        assert quick.rows() == [(kept, "y", None)]
        sent += 1024
        assert sent < 50_000
    assert rank.expect(Kind.ABORT)[0].id == rid
    rank.step({rid: ""}, {rid: FinishReason("abort")})
    rank.finish(kept)
    quick.end(kept)
    world.assert_empty()
    # Later frames get through again, and their numbers show what was lost.
    last = 1
    while (seq := slow.receive()[0].seq) == last + 1:
        last = seq
        if last % 1024 == 0:
            fresh = slow.generate()
            rank.take()
            rank.finish(fresh)
    assert seq > last + 1
    assert world.state()["workers"][0]["lost"] > 0


def test_supervision_ends_everything_with_one_error_each(make):
    world = make(workers=2, detokenizer_workers=2)
    rids = {worker.generate(): worker for worker in world.workers for _ in range(8)}
    for _ in rids:
        world.ranks[0].take()
    assert world.plane.fail_all("scheduler 0 was killed by signal 9", 2.0) == 16
    for worker in world.workers:
        left = {rid for rid in rids if rids[rid] is worker}
        while left:
            for rid, text, reason in worker.rows():
                assert (text, reason.status) == ("", 503) and "signal 9" in reason.message
                left.remove(rid)
    late = world.workers[0].generate()
    assert world.workers[0].end(late)[1].status == 503
    assert world.plane.fail_all("again", 2.0) == 0
    world.ranks[0].step({}, load=Load())
    world.assert_empty()


def test_drain_waits_for_the_last_request(make):
    world = make()
    (worker,), (rank,) = world.workers, world.ranks
    rid = worker.generate()
    rank.take()
    assert not world.plane.drain(0.05)
    late = worker.generate()
    assert worker.end(late)[1].status == 503
    rank.finish(rid)
    assert world.plane.drain(5.0)
    assert worker.end(rid)[1] == FinishReason("length")


def test_another_schema_ends_the_start_with_the_reason(make):
    world = make(up=False)
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.connect(f"ipc://{world.run_dir}/egress.ipc")
    hello = Envelope(Kind.HELLO, schema=1, sender_epoch=1, seq=1, exts=name_exts("old rank", "0.0.1"))
    push.send_multipart([encode_envelope(hello), b"\xc0"])
    reason = world.plane.wait(WAIT_S)
    assert reason and "rank 0 (old rank, build 0.0.1) speaks message schema 0x1" in reason
    context.destroy(linger=0)


def test_threads_have_names_and_an_idle_plane_sleeps(make):
    world = make(workers=2, ranks=2, detokenizer_workers=3)
    process = psutil.Process()
    names = {Path(f"/proc/self/task/{thread.id}/comm").read_text().strip() for thread in process.threads()}
    assert {"router", "fanout", "detok-1", "detok-2"} <= names
    before = process.cpu_times()
    time.sleep(2.0)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.2
    assert world.page.control_age() < 1.0


def test_stop_takes_no_time_and_ends_the_threads(make):
    world = make(detokenizer_workers=4)
    assert world.plane.stop(2.0)
    assert world.plane.stop(2.0), "twice is no error"
    with pytest.raises(_core.PhaseError):
        world.plane.state()
    with pytest.raises(_core.PhaseError):
        world.plane.start()
    assert world.plane.wait(0.0) is None, "an end that was asked for is no failure"


def test_waiting_holds_no_lock_on_python(make):
    world = make()
    counted, done = 0, threading.Event()
    thread = threading.Thread(target=lambda: (world.plane.wait(0.5), done.set()))
    thread.start()
    while not done.is_set():
        counted += 1
    thread.join()
    assert counted > 1000


def test_settings_are_checked_before_anything_is_made(tmp_path):
    good = {"run_dir": str(tmp_path), "epoch": 1, "rank_epochs": [1], "worker_epochs": [1]}
    for wrong in (
        {"rank_epochs": []},
        {"worker_epochs": [0]},
        {"epoch": 0},
        {"detokenizer_workers": 0},
        {"load_balance_method": "fastest"},
        {"rank_wait_timeout": -1.0},
        {"rank_wait_timeout": float("nan")},
        {"run_dir": "/" + "x" * 100},
    ):
        with pytest.raises(_core.SettingError):
            _core.ControlPlane(**{**good, **wrong})
    assert not list(tmp_path.iterdir())
    plane = _core.ControlPlane(**good, tokenizer_file=str(tmp_path / "missing.json"))
    with pytest.raises(_core.ResourceError, match="tokenizer"):
        plane.start()
    plane = _core.ControlPlane(**{**good, "run_dir": str(tmp_path / "missing")})
    with pytest.raises(_core.ResourceError, match="missing"):
        plane.start()
