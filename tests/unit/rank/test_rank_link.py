"""The link of a rank: greeting, fencing, dispatch numbers, malformed input, waking."""

from __future__ import annotations

import threading
import time

import pytest
from servekit.messages import requests as r
from servekit.messages.batches import BatchTokenIDOutput
from servekit.messages.columns import schema_hash
from servekit.messages.envelope import Envelope, Ext, Kind, Load, encode_envelope
from servekit.transport.rank_link import LinkError, RankLink


def greeted(control) -> Envelope:
    hello, body = control.receive()
    assert hello.kind == Kind.HELLO and body is None
    return hello


def test_the_first_frame_is_a_greeting(control, link):
    hello = greeted(control)
    assert (hello.seq, hello.sender_epoch, hello.receiver_epoch, hello.schema) == (
        1,
        control.rank_epoch,
        0,
        schema_hash(),
    )
    assert (hello.ext(Ext.NAME), hello.ext(Ext.BUILD)) == (b"servekit::scheduler[dp=0]", b"test")
    control.hello()
    control.generate(7)
    assert link.receive(5)[0][0].id == 7


def test_another_schema_ends_the_link(control, link):
    control.hello(schema=1)
    with pytest.raises(LinkError, match="speaks message schema 0000000000000001"):
        link.receive(5)


def test_requests_come_decoded_and_in_order(control, link):
    for rid in (5, 6, 7):
        control.generate(rid, max_new_tokens=rid)
    control.abort(6)
    got = []
    while len(got) < 4:
        got += link.receive(5)
    assert [(envelope.kind, envelope.id) for envelope, _ in got] == [
        (Kind.GENERATE, 5),
        (Kind.GENERATE, 6),
        (Kind.GENERATE, 7),
        (Kind.ABORT, 6),
    ]
    assert got[2][1].sampling_params.max_new_tokens == 7
    assert link.last_dispatch == 3


def test_tokens_to_resume_behind_come_as_an_attachment(control, link):
    ids = b"\7\0\0\0\x09\0\0\0"
    for rid, attachments in ((5, ()), (6, (ids,))):
        body = r.TokenizedGenerateReqInput(rid, b"\1\0\0\0", r.SamplingParams(4))
        control.send(Envelope(Kind.GENERATE, rid), body, None, *attachments)
    got = []
    while len(got) < 2:
        got += link.receive(5)
    assert [body.resume_output_ids for _, body in got] == [b"", ids]


def test_a_batch_tells_rank_epochs_load_and_dispatch(control, link):
    greeted(control)
    control.generate(5)
    link.receive(5)
    load = Load(1, 2, 3, 4, 5)
    link.send_batch(BatchTokenIDOutput(rids=[5], decode_ids=[b"\1\0\0\0"]), load)
    envelope, batch = control.receive()
    assert (envelope.kind, envelope.rows, envelope.rank, envelope.sender) == (Kind.BATCH_TOKEN_ID, 1, 0, 0)
    assert (envelope.sender_epoch, envelope.receiver_epoch, envelope.seq) == (control.rank_epoch, control.epoch, 2)
    assert (envelope.last_dispatch, envelope.load, batch.rids) == (1, load, [5])
    link.send_batch(BatchTokenIDOutput(rids=[]), load, last_dispatch=0)
    assert control.receive()[0].last_dispatch == 0


def test_a_dispatch_is_acknowledged_only_with_a_load_that_counts_it(control, link):
    greeted(control)
    control.generate(5)
    link.receive(5)
    link.send_batch(BatchTokenIDOutput(rids=[]), None)
    assert (control.receive()[0].last_dispatch, link.last_dispatch) == (0, 1)


def test_a_rank_that_waits_with_requests_says_so(control, link, monkeypatch):
    monkeypatch.setattr("servekit.transport.rank_link.REPEAT_S", 0.02)
    greeted(control)
    assert link.receive(0.1) == []
    control.generate(5)
    link.receive(5)
    load = Load(1, 0, 3, 4, 5)
    link.send_batch(BatchTokenIDOutput(rids=[]), load)
    assert link.receive(0.1) == []
    told = [control.receive() for _ in range(3)]
    assert [(envelope.load, envelope.last_dispatch, batch.rids) for envelope, batch in told] == [(load, 1, [])] * 3
    link.send_batch(BatchTokenIDOutput(rids=[]), Load())
    while control.receive()[0].load != Load():
        pass
    assert link.receive(0.1) == [] and control.receive(0.1) is None


def test_frames_of_other_lives_are_dropped_and_counted(control, link):
    for sender, receiver in (
        (control.epoch - 1, control.rank_epoch),
        (control.epoch + 1, control.rank_epoch),
        (control.epoch, 4),
    ):
        body = r.AbortReq(1)
        control.send(Envelope(Kind.ABORT, 1, sender_epoch=sender, receiver_epoch=receiver), body)
    control.abort(2)
    assert [envelope.id for envelope, _ in link.receive(5)] == [2]
    assert link.fenced == 3


def test_a_later_control_process_is_greeted_and_heard(control, link):
    assert greeted(control).seq == 1
    control.generate(1)
    link.receive(5)
    control.hello(epoch=control.epoch + 1)
    control.send(Envelope(Kind.ABORT, 2, sender_epoch=control.epoch), r.AbortReq(2))
    control.send(Envelope(Kind.ABORT, 3, sender_epoch=control.epoch + 1), r.AbortReq(3))
    assert [envelope.id for envelope, _ in link.receive(5)] == [3]
    assert greeted(control).seq == 1
    assert (link.last_dispatch, link.fenced) == (0, 1)
    link.reply(Envelope(Kind.GET_STATE, 9), r.ControlReply(True))
    assert control.receive()[0].receiver_epoch == control.epoch + 1


@pytest.mark.parametrize(
    ("body", "raw"),
    [
        (None, b"\xc1"),
        (None, b""),
        ([], None),
        (r.AbortReq(5), None),
        (r.TokenizedGenerateReqInput(6, b"\1\0\0\0", r.SamplingParams(1)), None),
        (r.TokenizedGenerateReqInput(5, b"\1\0\0", r.SamplingParams(1)), None),
        (r.TokenizedGenerateReqInput(5, b"", r.SamplingParams(1)), None),
    ],
)
def test_a_malformed_request_is_answered_with_one_error_row(control, link, body, raw):
    greeted(control)
    control.send(Envelope(Kind.GENERATE, 5, rank=0, dispatch=1), body, raw)
    assert link.receive(0.05) == []
    _, batch = control.receive()
    assert (batch.rids, batch.finished_reasons[0].type, batch.finished_reasons[0].status) == ([5], "error", 400)
    assert (link.dropped, link.last_dispatch) == (1, 1)
    control.generate(8)
    assert [envelope.id for envelope, _ in link.receive(5)] == [8]


def test_other_rubbish_is_dropped_and_logged_once(control, link, caplog):
    good = encode_envelope(Envelope(Kind.ABORT, 1, sender_epoch=control.epoch, receiver_epoch=control.rank_epoch))
    for _ in range(3):
        control.send_frames(b"")
        control.send_frames(b"\0" * 60, b"x")
        control.send_frames(good)
        control.send(Envelope(Kind.BATCH_STR, 1), None)
    control.abort(2)
    assert [envelope.id for envelope, _ in link.receive(5)] == [2]
    assert link.dropped == 12
    assert len(caplog.records) == 3


def test_waiting_lasts_as_long_as_it_was_told(link):
    began = time.monotonic()
    assert link.receive(0.0123) == []
    assert 0.012 <= time.monotonic() - began < 0.1
    assert link.receive(0) == []


def test_wake_ends_a_wait(link):
    timer = threading.Timer(0.05, link.wake)
    timer.start()
    assert link.receive(10) == []
    assert link.receive(0.01) == []
    timer.join()


def test_who_watches_sees_when_it_waits_for_messages(control):
    said: list[tuple[str, int]] = []

    class Pulse:
        def enter(self, phase: str, step: int) -> None:
            said.append((phase, step))

        def moved(self) -> None:
            said.append(("moved", 0))

    link = RankLink(control.ports, 0, control.rank_epoch, "title", "test", Pulse())
    control.hello()
    control.generate(1)
    while not link.receive(5):
        pass
    said.clear()
    link.receive(0)
    assert said == [], "it does not wait"
    link.enter("computing", 4)
    link.enter("working")
    link.receive(0.01)
    assert said == [("computing", 4), ("working", 4), ("idle", 4), ("working", 4)]
    said.clear()
    link.send_batch(BatchTokenIDOutput(rids=[]), Load(running=1))
    assert said == [("moved", 0)]
    # What it repeats while it waits is no progress, and it may wait for others.
    link.resting = "waiting"
    link.receive(0.6)
    assert said == [("moved", 0), ("waiting", 4), ("working", 4)]
    link.close()


def test_a_burst_that_comes_while_waiting_is_complete(control, link):
    greeted(control)
    got = []
    sender = threading.Thread(target=lambda: [control.generate(rid) for rid in range(1, 5001)])
    sender.start()
    while len(got) < 5000:
        found = link.receive(5)
        assert found
        got += [envelope.id for envelope, _ in found]
    sender.join()
    assert got == list(range(1, 5001))
