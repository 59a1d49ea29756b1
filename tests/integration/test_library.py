"""The router and the controller as parts of somebody else's program, over sockets that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from servekit import _core
from servekit.messages.batches import BatchStrOutput, BatchTokenIDOutput, FinishReason
from servekit.messages.envelope import Envelope, Kind, Load, decode_envelope, encode_envelope, mint_rid, room_ext

from tests.integration.control_world import Rank, Worker, ids_of, until

WAIT_MS = 10_000
METHODS = _core.LoadBalanceMethod


class Program:
    """A controller between bare sockets."""

    def __init__(self, folder: Path, ranks: int = 3, method: _core.LoadBalanceMethod = METHODS.ROUND_ROBIN) -> None:
        self.context = zmq.Context()
        address = f"ipc://{folder}"
        self.output = self.socket(zmq.PULL)
        self.output.bind(f"{address}/out")
        self.controller = _core.DataParallelController(
            ingress=f"{address}/in",
            egress=f"{address}/back",
            ranks=[f"{address}/r{rank}" for rank in range(ranks)],
            method=method,
            output=f"{address}/out",
        )
        self.controller.start()
        self.requests, self.back = self.socket(zmq.PUSH), self.socket(zmq.PUSH)
        self.requests.connect(f"{address}/in")
        self.back.connect(f"{address}/back")
        self.ranks = [self.socket(zmq.PULL) for _ in range(ranks)]
        for rank, socket in enumerate(self.ranks):
            socket.connect(f"{address}/r{rank}")

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        return socket

    def send(self, envelope: Envelope, *rest: bytes) -> None:
        self.requests.send_multipart([encode_envelope(envelope), *(rest or (b"body",))])

    def taken(self, rank: int) -> tuple[Envelope, list[bytes]]:
        head, *rest = self.ranks[rank].recv_multipart()
        return decode_envelope(head), rest

    def close(self) -> None:
        assert self.controller.stop(2.0)
        self.context.destroy(linger=0)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.close()


def test_requests_take_turns_and_arrive_as_they_were_sent(program: Program) -> None:
    for i in range(6):
        program.send(Envelope(Kind.GENERATE, i, tokens=10, exts=[(999, b"kept")]), b"body", b"more")
    for i in range(6):
        envelope, rest = program.taken(i % 3)
        assert (envelope.id, envelope.rank, envelope.dispatch) == (i, i % 3, i + 1)
        assert (envelope.seq, envelope.sender, envelope.attempt) == (i // 3 + 1, 0, 1)
        assert (rest, envelope.exts) == ([b"body", b"more"], [(999, b"kept")])
    assert program.controller.total_requests == [2, 2, 2]
    assert program.controller.total_tokens == [20, 20, 20]


def test_reports_come_back_with_the_batches_and_these_go_on(program: Program) -> None:
    for i in range(3):
        program.send(Envelope(Kind.GENERATE, i, tokens=7))
    envelope, _ = program.taken(1)
    load = Load(running=1, held_tokens=9)
    head = Envelope(Kind.BATCH_TOKEN_ID, rank=1, sender=1, rows=0, last_dispatch=envelope.dispatch, load=load)
    frames = [encode_envelope(head), b"anything", b"attached"]
    program.back.send_multipart(frames)
    assert program.output.recv_multipart() == frames
    assert (program.controller.total_requests, program.controller.total_tokens) == ([1, 1, 1], [7, 9, 7])
    assert program.controller.counters()["reports"] == 1


def test_what_no_rank_takes_ends_with_an_error(program: Program) -> None:
    program.send(Envelope(Kind.GENERATE, 5, rank=9))
    for rank in range(3):
        program.controller.set_active(rank, False)
    assert program.controller.active == [False] * 3
    program.send(Envelope(Kind.GENERATE, 6))
    ends = []
    for _ in range(2):
        head, body = program.output.recv_multipart()
        batch = msgspec.msgpack.decode(body, type=BatchTokenIDOutput)
        assert decode_envelope(head).rows == 1 and batch.finished_reasons is not None
        ends.append((batch.rids[0], batch.finished_reasons[0].status))
    assert ends == [(5, 400), (6, 503)]
    program.controller.set_active(1, True)
    program.send(Envelope(Kind.GENERATE, 7))
    assert program.taken(1)[0].id == 7


def test_aborts_go_to_every_rank_and_garbage_nowhere(program: Program) -> None:
    program.requests.send_multipart([b"x"])
    program.requests.send_multipart([b"x" * 40, b""])
    program.send(Envelope(Kind.BATCH_STR, rows=1))
    program.back.send_multipart([encode_envelope(Envelope(Kind.GENERATE, 1)), b""])
    program.send(Envelope(Kind.ABORT, 77))
    assert [program.taken(rank)[0].id for rank in range(3)] == [77] * 3
    until(lambda: program.controller.counters()["malformed"] == 4, program.controller.counters)
    assert program.controller.counters()["broadcast"] == 1


def test_rooms_choose_the_rank(tmp_path: Path) -> None:
    program = Program(tmp_path, method=METHODS.FOLLOW_BOOTSTRAP_ROOM)
    for room in (4, 2, 3):
        program.send(Envelope(Kind.GENERATE, room, exts=[room_ext(room)]))
        assert program.taken(room % 3)[0].id == room
    program.close()


def test_a_controller_has_one_life(program: Program) -> None:
    with pytest.raises(_core.PhaseError):
        program.controller.start()
    assert program.controller.stop(2.0)
    with pytest.raises(_core.PhaseError):
        program.controller.start()


def test_the_router_over_named_sockets(tmp_path: Path) -> None:
    """Its sockets are the caller's; without a tokenizer the workers get ids."""
    router = _core.MultiTokenizerRouter(
        ingress=f"ipc://{tmp_path}/ingress.ipc",
        egress=f"ipc://{tmp_path}/egress.ipc",
        ranks=[f"ipc://{tmp_path}/rank{rank}.ipc" for rank in range(2)],
        run_dir=tmp_path,
        worker_epochs=[1, 1],
        method=METHODS.TOTAL_REQUESTS,
    )
    with pytest.raises(_core.PhaseError):
        router.state()
    router.start()
    workers = [Worker(tmp_path, i) for i in range(2)]
    ranks = [Rank(tmp_path, i) for i in range(2)]
    try:
        rids = {worker.generate(): worker for worker in workers for _ in range(2)}
        taken: dict[int, list[int]] = {i: [rank.take().id for _ in range(2)] for i, rank in enumerate(ranks)}
        assert {rid for part in taken.values() for rid in part} == set(rids)
        assert json.loads(router.state())["in_flight"] == 4
        for rank, part in zip(ranks, taken.values(), strict=True):
            rank.finish(*part, text="ab")
        seen: dict[int, Any] = {}
        for worker in workers:
            while sum(rids[rid] is worker for rid in seen) < 2:
                envelope, (body,) = worker.receive()
                assert envelope.kind == Kind.BATCH_TOKEN_ID
                batch = msgspec.msgpack.decode(body, type=BatchTokenIDOutput)
                assert batch.finished_reasons == [FinishReason("length")] * len(batch.rids)
                seen.update(zip(batch.rids, batch.decode_ids or [], strict=True))
        assert seen == dict.fromkeys(rids, ids_of("ab"))
        assert router.drain(5.0)
        late = workers[0].generate()
        assert workers[0].end(late)[1].status == 503
    finally:
        assert router.stop(2.0)
        for peer in [*workers, *ranks]:
            peer.close()


def test_ids_lead_back_whoever_minted_them(tmp_path: Path) -> None:
    """The parts fit together: what a rank sends is split and fanned out by the ids alone."""
    mapping = _core.SocketMapping(tmp_path)
    context = zmq.Context()
    sockets = []
    for worker in range(3):
        socket = context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.bind(f"ipc://{tmp_path}/w{worker}-1.ipc")
        sockets.append(socket)
    batch = BatchStrOutput([mint_rid(i % 3, 1, i) for i in range(9)], output_strs=[f"text {i}" for i in range(9)])
    for worker, epoch, body in _core.split_batch(msgspec.msgpack.encode(batch)):
        head = encode_envelope(Envelope(Kind.BATCH_STR, rows=3))
        assert mapping.send_output(mint_rid(worker, epoch, 0), head, body)
    for worker, socket in enumerate(sockets):
        socket.recv_multipart()
        _, body = socket.recv_multipart()
        part = msgspec.msgpack.decode(body, type=BatchStrOutput)
        assert part.output_strs == [f"text {i}" for i in range(9) if i % 3 == worker]
    context.destroy(linger=0)
