"""Both ends of a worker's links: stamps, numbers, fences, and kinds that nobody handles."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
from servekit.messages.envelope import Envelope, Ext, Kind, decode_envelope, encode_envelope
from servekit.transport import sender as sender_module
from servekit.transport.dispatcher import TypeBasedDispatcher
from servekit.transport.receiver import TURN, Expected, Receiver
from servekit.transport.sender import Link, LinkFull, SenderWrapper

LINK = Link(sender=2, sender_epoch=5, receiver_epoch=7, name="http[2]", schema=99, build="1.0")


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.term()


def test_a_link_begins_with_hello_and_numbers_its_frames(context: zmq.Context, tmp_path: Path) -> None:
    with context.socket(zmq.PULL) as peer:
        peer.bind(f"ipc://{tmp_path}/x")
        sender = SenderWrapper(context, tmp_path / "x", LINK)
        sender.send(Envelope(Kind.ABORT, 9, sender=77, sender_epoch=77, receiver_epoch=77, seq=77), ["body"], [b"more"])
        frames = [peer.recv_multipart() for _ in range(2)]
        sender.close()
    hello, abort = (decode_envelope(frame[0]) for frame in frames)
    assert (hello.kind, hello.seq, hello.schema) == (Kind.HELLO, 1, 99)
    assert (hello.ext(Ext.NAME), hello.ext(Ext.BUILD)) == (b"http[2]", b"1.0")
    assert frames[0][1] == b"\xc0"
    assert (abort.kind, abort.id, abort.seq) == (Kind.ABORT, 9, 2)
    assert (abort.sender, abort.sender_epoch, abort.receiver_epoch) == (2, 5, 7)
    assert msgspec.msgpack.decode(frames[1][1]) == ["body"]
    assert frames[1][2] == b"more"


def test_a_peer_that_does_not_read_is_an_error_and_loses_no_number(
    context: zmq.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "HIGH_WATER_MARK", 3)
    sender = SenderWrapper(context, tmp_path / "nobody", LINK)
    sent = 0
    with pytest.raises(LinkFull):
        for _ in range(100):
            sender.send(Envelope(Kind.ABORT, 1), None)
            sent += 1
    assert sender.sent == sent + 1
    sender.close()


class Received:
    """A receiver fed with whatever a test sends."""

    def __init__(self, context: zmq.Context, folder: Path) -> None:
        self.context, self.path = context, folder / "w"
        self.ids: list[int] = []
        self.gaps: list[str] = []
        self.acknowledged: list[int] = []
        self.can_tell = True
        self.turns: list[int] = []
        self.dispatcher = TypeBasedDispatcher(
            {
                Kind.ABORT: lambda e, f: self.ids.append(e.id),
                Kind.CONTROL_REPLY: lambda e, f: self.ids.append(e.id),
                Kind.PAUSE: self.fail,
            }
        )
        expected = Expected(epoch=7, sender_epoch=5, schema=99)
        self.receiver = Receiver(
            context, self.path, expected, self.dispatcher, self.gaps.append, self.acknowledge,
            urgent=(Kind.CONTROL_REPLY,), on_turn=lambda: self.turns.append(len(self.ids)),
        )  # fmt: skip

    def acknowledge(self, number: int) -> bool:
        self.acknowledged.append(number)
        return self.can_tell

    def fail(self, envelope: Envelope, frames: object) -> None:
        raise ValueError("a handler's own fault")

    def send(
        self, context: zmq.Context, messages: Sequence[Envelope | list[bytes]], link: Link, skip: dict[int, int]
    ) -> None:
        sender = SenderWrapper(context, self.path, link)
        for i, message in enumerate(messages):
            sender.sent += skip.get(i, 0)
            if isinstance(message, Envelope):
                sender.send(message, None)
            else:
                sender._socket.send_multipart(message)
        sender.close()

    def take(
        self,
        *messages: Envelope | list[bytes],
        until: Callable[[], bool],
        link: Link = LINK,
        skip: dict[int, int] | None = None,
    ) -> None:
        """Send messages over one link and receive until a condition is true; `skip` leaves out numbers before some."""

        async def run() -> None:
            self.receiver.start(asyncio.get_running_loop())
            if messages:
                self.send(self.context, messages, link, skip or {})
            try:
                async with asyncio.timeout(5):
                    while not until():
                        await asyncio.sleep(0.005)
            finally:
                self.receiver.close()

        asyncio.run(run())


def abort(number: int) -> Envelope:
    return Envelope(Kind.ABORT, number)


def test_messages_arrive_in_order(context: zmq.Context, tmp_path: Path) -> None:
    received = Received(context, tmp_path)
    received.take(*[abort(i) for i in range(1, 1001)], until=lambda: len(received.ids) == 1000)
    assert received.ids == list(range(1, 1001))
    assert received.gaps == []


def test_what_is_urgent_does_not_wait_behind_the_rest(context: zmq.Context, tmp_path: Path) -> None:
    received = Received(context, tmp_path)
    messages = [*[abort(i) for i in range(1, 2001)], Envelope(Kind.CONTROL_REPLY, 9999)]
    with zmq.Context() as others:
        received.send(others, messages, LINK, {})
    # All of it has left, and lies before the receiver when that begins.
    received.take(until=lambda: received.acknowledged[-1:] == [2002])
    assert received.ids.index(9999) < 1000
    received.ids.remove(9999)
    assert received.ids == list(range(1, 2001)) and received.gaps == []
    assert max(b - a for a, b in itertools.pairwise([0, *received.turns])) <= TURN + 1


def test_a_lost_frame_is_noticed_once(context: zmq.Context, tmp_path: Path) -> None:
    received = Received(context, tmp_path)
    received.take(abort(1), abort(2), abort(3), skip={1: 4}, until=lambda: len(received.ids) == 3)
    assert received.ids == [1, 2, 3]
    assert received.gaps == ["frames 3 to 6 from the control process were lost"]


@pytest.mark.parametrize("field", ["sender_epoch", "receiver_epoch"])
def test_other_lives_are_fenced(context: zmq.Context, tmp_path: Path, field: str) -> None:
    received = Received(context, tmp_path)
    received.take(abort(1), link=replace(LINK, **{field: 6}), until=lambda: received.receiver.fenced == 2)
    assert received.ids == []


def test_another_schema_is_not_listened_to(context: zmq.Context, tmp_path: Path) -> None:
    received = Received(context, tmp_path)
    received.take(abort(1), link=replace(LINK, schema=98), until=lambda: received.receiver.malformed == 2)
    assert received.ids == []


def test_a_link_without_hello_is_counted(context: zmq.Context, tmp_path: Path) -> None:
    received = Received(context, tmp_path)
    late = encode_envelope(Envelope(Kind.ABORT, 1, 0, 2, 5, 7, 9))
    received.receiver._receive([late, b"\xc0"])
    received.receiver.close()
    assert received.receiver.malformed == 1


def test_garbage_and_faults_are_counted(context: zmq.Context, tmp_path: Path) -> None:
    received = Received(context, tmp_path)
    received.take(
        [b"x"], [b"", b""], [b"y" * 40, b"z"], Envelope(Kind.PAUSE), Envelope(Kind.CONTINUE),
        Envelope(Kind.CONTINUE), abort(4),
        until=lambda: bool(received.ids),
    )  # fmt: skip
    assert received.ids == [4]
    assert received.receiver.malformed == 4
    assert received.dispatcher.unknown == 2


def test_what_was_handled_is_told_soon_and_once(context: zmq.Context, tmp_path: Path) -> None:
    received = Received(context, tmp_path)
    received.take(*[abort(i) for i in range(500)], until=lambda: 501 in received.acknowledged)
    assert received.acknowledged == sorted(set(received.acknowledged))
    assert len(received.acknowledged) < 100
    assert received.receiver._timer is None, "nothing is left to tell"


def test_what_could_not_be_told_is_told_again(context: zmq.Context, tmp_path: Path) -> None:
    received = Received(context, tmp_path)
    received.can_tell = False
    received.take(abort(1), until=lambda: received.acknowledged.count(2) >= 3)
