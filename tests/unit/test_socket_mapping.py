"""`SocketMapping` finds a worker by a request id alone and never waits for one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from servekit import _core
from servekit.messages.envelope import Envelope, Kind, decode_envelope, encode_envelope, http_worker_ipc, mint_rid

TEXT = encode_envelope(Envelope(Kind.BATCH_STR, rows=1))


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sk-sm-") as folder:
        yield Path(folder)


@pytest.fixture
def worker(run_dir: Path) -> Iterator[Callable[[int, int], zmq.Socket[bytes]]]:
    """Binds the socket of a worker's life."""
    context, sockets = zmq.Context(), []

    def bind(number: int, epoch: int) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.PULL)
        sockets.append(socket)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.bind(f"ipc://{run_dir}/{http_worker_ipc(number, epoch)}")
        return socket

    yield bind
    context.destroy(linger=0)


def test_a_link_opens_with_a_greeting_and_frames_are_numbered(worker, run_dir):
    mapping = _core.SocketMapping(str(run_dir), [1, 4097 + 1])
    assert len(mapping) == 0
    # Only the low bits of an epoch are in the id; the frame carries all of it.
    rid = mint_rid(1, 4098, 5)
    assert mapping.send_output(rid, TEXT, b"one") and mapping.send_output(rid, TEXT, b"two")
    socket = worker(1, 2)
    heads, bodies = zip(*[socket.recv_multipart() for _ in range(3)], strict=True)
    envelopes = [decode_envelope(head) for head in heads]
    assert [envelope.kind for envelope in envelopes] == [Kind.HELLO, Kind.BATCH_STR, Kind.BATCH_STR]
    assert [envelope.seq for envelope in envelopes] == [1, 2, 3]
    assert {(envelope.sender_epoch, envelope.receiver_epoch) for envelope in envelopes} == {(1, 4098)}
    assert envelopes[0].schema == int(_core.build_info()["schema"], 16)
    assert bodies == (b"\xc0", b"one", b"two")
    assert mapping.counters()[1]["messages"] == 2


def test_ids_that_lead_nowhere_are_counted_and_make_no_socket(run_dir):
    mapping = _core.SocketMapping(str(run_dir), [1])
    assert not mapping.send_output(mint_rid(0, 2, 1), TEXT, b"")
    assert not mapping.send_output(mint_rid(4000, 1, 1), TEXT, b"")
    mapping.remove(0)
    assert not mapping.send_output(mint_rid(0, 1, 1), TEXT, b"")
    assert len(mapping) == 0
    assert not mapping.acknowledge(mint_rid(0, 1, 1), 1) and not mapping.acknowledge(mint_rid(4000, 1, 1), 0)
    assert mapping.counters()[0]["unroutable"] == 2
    with pytest.raises(_core.MalformedError):
        mapping.send_output(mint_rid(0, 1, 1), b"no envelope", b"")


def test_a_worker_that_does_not_read_stops_nobody_and_learns_what_it_missed(worker, run_dir):
    mapping = _core.SocketMapping(str(run_dir), [1, 1])
    slow, quick = worker(0, 1), worker(1, 1)
    sent, body = 0, b"x" * 4096
    while mapping.send_output(mint_rid(0, 1, 1), TEXT, body):
        sent += 1
        assert sent < 100_000
    assert not mapping.send_output(mint_rid(0, 1, 1), TEXT, body)
    assert mapping.send_output(mint_rid(1, 1, 1), TEXT, b"unharmed")
    assert [quick.recv_multipart()[1] for _ in range(2)] == [b"\xc0", b"unharmed"]
    counters = mapping.counters()
    assert (counters[0]["messages"], counters[0]["lost"], counters[0]["cuts"]) == (sent, 2, 1)
    for _ in range(1 + sent):
        last = decode_envelope(slow.recv_multipart()[0]).seq
    assert last == 1 + sent
    while not mapping.send_output(mint_rid(0, 1, 1), TEXT, b"again"):
        pass
    assert decode_envelope(slow.recv_multipart()[0]).seq > last + 2


def test_cleared_sockets_connect_again(worker, run_dir):
    mapping = _core.SocketMapping(str(run_dir), [1])
    socket = worker(0, 1)
    for body in (b"before", b"after"):
        assert mapping.send_output(mint_rid(0, 1, 1), TEXT, body)
        assert [socket.recv_multipart()[1] for _ in range(2)] == [b"\xc0", body]
        mapping.clear_all_sockets()
        assert len(mapping) == 0


def test_any_worker_joins_where_none_is_registered(worker, run_dir):
    mapping = _core.SocketMapping(run_dir)
    lives = [(0, 1), (7, 4095), (4095, 2)]
    for number, epoch in lives:
        socket = worker(number, epoch)
        assert mapping.send_output(mint_rid(number, epoch, 1), TEXT, b"hi")
        assert [socket.recv_multipart()[1] for _ in range(2)] == [b"\xc0", b"hi"]
    assert len(mapping) == 3 and set(mapping.counters()) == {0, 7, 4095}
    mapping.remove(7)
    assert len(mapping) == 2
    assert not mapping.send_output(mint_rid(7, 4095, 2), TEXT, b"late")
    assert mapping.counters()[7]["unroutable"] == 1
    again = worker(7, 5)
    assert mapping.send_output(mint_rid(7, 5, 3), TEXT, b"another life")
    assert [again.recv_multipart()[1] for _ in range(2)] == [b"\xc0", b"another life"]


def test_a_worker_that_reads_but_never_says_so_is_cut_at_the_bound(worker, run_dir):
    mapping = _core.SocketMapping(run_dir, [1, 1], max_unacknowledged=10_000)
    silent, other = worker(0, 1), worker(1, 1)
    frame = len(TEXT) + 1000
    for i in range(10_000 // frame):
        assert mapping.send_output(mint_rid(0, 1, 1), TEXT, b"x" * 1000)
        while decode_envelope(silent.recv_multipart()[0]).seq < 2 + i:
            pass
    counters = mapping.counters()[0]
    assert counters["unacknowledged_bytes"] == (10_000 // frame) * frame
    assert (counters["unacknowledged_frames"], counters["cuts"]) == (10_000 // frame, 0)
    assert not mapping.send_output(mint_rid(0, 1, 1), TEXT, b"x" * 1000)
    # How its streams end is still told, within an eighth of the bound.
    assert mapping.send_output(mint_rid(0, 1, 1), TEXT, b"end")
    assert silent.recv_multipart()[1] == b"end"
    for _ in range(5):
        mapping.send_output(mint_rid(0, 1, 1), TEXT, b"x" * 1000)
    counters = mapping.counters()[0]
    assert (counters["cuts"], counters["unacknowledged_bytes"] <= 11_250) == (1, True)
    assert counters["lost"] == 6 - (counters["messages"] - 10_000 // frame - 1)
    assert mapping.send_output(mint_rid(1, 1, 1), TEXT, b"unharmed")
    assert [other.recv_multipart()[1] for _ in range(2)] == [b"\xc0", b"unharmed"]


def test_a_slow_worker_that_acknowledges_is_not_cut(worker, run_dir):
    mapping = _core.SocketMapping(run_dir, [1], max_unacknowledged=10_000)
    slow, rid = worker(0, 1), mint_rid(0, 1, 1)
    for i in range(100):
        assert mapping.send_output(rid, TEXT, b"x" * 1000)
        seq = 0
        while seq < 2 + i:
            seq = decode_envelope(slow.recv_multipart()[0]).seq
        if i % 8 == 7:
            assert mapping.acknowledge(rid, seq)
    assert not mapping.acknowledge(rid, seq + 1), "it was never sent so many"
    counters = mapping.counters()[0]
    assert (counters["messages"], counters["cuts"], counters["lost"]) == (100, 0, 0)


def test_a_cut_worker_is_sent_to_again_once_it_has_caught_up(worker, run_dir):
    mapping = _core.SocketMapping(run_dir, [1], max_unacknowledged=4000)
    rid = mint_rid(0, 1, 1)
    sent = 0
    while mapping.send_output(rid, TEXT, b"x" * 1000):
        sent += 1
    socket = worker(0, 1)
    for _ in range(1 + sent):
        seq = decode_envelope(socket.recv_multipart()[0]).seq
    assert mapping.acknowledge(rid, seq)
    for _ in range(sent):
        assert mapping.send_output(rid, TEXT, b"x" * 1000)
    assert decode_envelope(socket.recv_multipart()[0]).seq == seq + 2, "the lost one has its number"
    assert not mapping.send_output(rid, TEXT, b"x" * 1000)
    assert mapping.counters()[0]["cuts"] == 2
