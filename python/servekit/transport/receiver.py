"""The socket on which an HTTP worker receives, driven by the event loop without a thread or a task."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import zmq

from servekit.messages.envelope import Envelope, EnvelopeError, Kind, decode_envelope
from servekit.transport.dispatcher import TypeBasedDispatcher

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 65536
"""Most messages that wait on this side; then the peer's queue fills."""

ACKNOWLEDGE_S = 0.05
"""How soon the peer is told what was handled."""

TURN = 16
"""Most messages that are handled before others on the loop have their turn."""
LOOK_AHEAD = 1024
"""Most messages that are taken from the socket in one turn."""

# Plain numbers: `&` and `|` of pyzmq's own make an enum member each time.
_READABLE = int(zmq.POLLIN)
_NO_WAIT = int(zmq.NOBLOCK)


@dataclass(frozen=True)
class Expected:
    """What this side accepts: its own epoch, the peer's epoch, and the hash of the message definitions."""

    epoch: int
    sender_epoch: int
    schema: int


class Receiver:
    """A bound PULL socket. One wake-up of the loop empties it.

    Messages are handled in their order, but for the urgent kinds: when this process is behind, what an operator said
    or waits for does not stand in line behind everybody's text.

    Frames for another life of this process or from another life of the peer are dropped and counted; a number that
    is missing on the link means that frames were lost, and `on_gap` is told. `acknowledge` is told the number of the
    frame up to which all are handled, at most every `ACKNOWLEDGE_S` seconds and only after something was handled; it
    says whether it could.

    Attributes:
        fenced: frames dropped because an epoch did not fit.
        malformed: frames that were no message of this schema.
        gaps: times that numbers were missing.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        path: str | os.PathLike[str],
        expected: Expected,
        dispatcher: TypeBasedDispatcher,
        on_gap: Callable[[str], None],
        acknowledge: Callable[[int], bool],
        *,
        urgent: Collection[Kind] = (),
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind the socket; nothing is received before `start`.

        Args:
            urgent: kinds that are handled as soon as they are seen.
            on_turn: called after up to `TURN` messages have been handled, and before anybody else has the loop.
        """
        self.fenced = 0
        self.malformed = 0
        self.gaps = 0
        self._expected = expected
        self._dispatcher = dispatcher
        self._on_gap = on_gap
        self._acknowledge = acknowledge
        self._urgent = frozenset(urgent)
        self._on_turn = on_turn
        self._waiting: deque[tuple[Envelope, list[bytes]]] = deque()
        self._returns = False
        self._timer: asyncio.TimerHandle | None = None
        self._next_seq: int | None = None
        self._mismatch = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{os.fspath(path)}")

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive on this loop from now on."""
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self._drain)
        self._drain()

    def close(self) -> None:
        """Stop receiving and close the socket."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._socket.close()

    def _drain(self) -> None:
        """Take what has come, handle some of it, and come back for the rest after others have had a turn."""
        if self._loop is None:
            return
        # The descriptor of a ZeroMQ socket is edge-triggered: it tells nothing more until the socket was seen empty.
        more = not self._take()
        try:
            for _ in range(min(TURN, len(self._waiting))):
                envelope, frames = self._waiting.popleft()
                self._handle(envelope, frames)
            self._on_turn()
        finally:
            # One return at a time: the descriptor may call in between, and each call would make one more.
            if self._loop is not None and (more or self._waiting) and not self._returns:
                self._returns = True
                self._loop.call_soon(self._return)

    def _return(self) -> None:
        self._returns = False
        self._drain()

    def _take(self) -> bool:
        """Empty the socket, up to a bound; whether it is empty."""
        for _ in range(LOOK_AHEAD):
            # Asking costs less than the exception that an empty socket raises.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return True
            frames = [self._socket.recv(_NO_WAIT)]
            while self._socket.getsockopt(zmq.RCVMORE):
                frames.append(self._socket.recv(_NO_WAIT))
            self._receive(frames)
        return False

    def _receive(self, frames: list[bytes]) -> None:
        try:
            envelope = decode_envelope(frames[0])
            if len(frames) < 2:
                raise EnvelopeError("a message without a body")
        except EnvelopeError as error:
            self._count_malformed(str(error))
            return
        expected = self._expected
        if envelope.sender_epoch != expected.sender_epoch or envelope.receiver_epoch not in (expected.epoch, 0):
            self.fenced += 1
            return
        if envelope.kind == Kind.HELLO:
            if envelope.schema != expected.schema:
                self._mismatch = True
                self._count_malformed(f"peer speaks schema {envelope.schema:016x}, this build {expected.schema:016x}")
                return
            self._next_seq = envelope.seq + 1
            self._tell_later()
            return
        if self._mismatch:
            self.malformed += 1
            return
        if self._next_seq is None:
            self._count_malformed("the first frame on the link was no HELLO")
            self._next_seq = envelope.seq
        if envelope.seq != self._next_seq:
            self.gaps += 1
            self._on_gap(f"frames {self._next_seq} to {envelope.seq - 1} from the control process were lost")
        self._next_seq = envelope.seq + 1
        if envelope.kind in self._urgent:
            self._handle(envelope, frames)
        else:
            self._waiting.append((envelope, frames))

    def _handle(self, envelope: Envelope, frames: list[bytes]) -> None:
        try:
            self._dispatcher.dispatch(envelope, frames[1:])
        except Exception:
            # A fault in one message must not end the loop that serves everybody's.
            self.malformed += 1
            log.exception("a message of kind %s could not be handled", envelope.kind.name)
        self._tell_later()

    def _tell_later(self) -> None:
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(ACKNOWLEDGE_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        # Urgent ones that were handled beyond those that wait are told of with them.
        following = self._waiting[0][0].seq if self._waiting else self._next_seq
        if following is not None and not self._acknowledge(following - 1):
            self._tell_later()

    def _count_malformed(self, why: str) -> None:
        self.malformed += 1
        if self.malformed == 1:
            log.error("dropped a malformed message: %s (later ones are only counted)", why)
