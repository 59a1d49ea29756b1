"""The line between the main processes of node 0 and of another node: numbered messages both ways, over CURVE.

Both ends beat every second, and both notice when the other does not: the network, not only a process, may have gone.
Nothing stands on the connection. It may break and come again, and where that lost a message its number tells.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from typing import Any, TypeAlias

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from servekit.config.secrets import Keys
from servekit.runtime.nodes.addresses import Address
from servekit.runtime.nodes.shape import Shape

logger = logging.getLogger("servekit.runtime")

BEAT_S = 1.0
"""How often each end says that it is there."""
SILENCE_S = 8.0
"""How long it may be silent before it counts as gone: with a beat and a look, less than the promised 10 s."""
CUT_BEATS = 2
"""So many beats in a row that find no connection mean the same, sooner: one that broke comes again in 0.1 s."""
LINGER_MS = 1000
"""How long the last words may take to leave."""
MAX_MESSAGE = 8 << 20
"""Bytes of the longest message."""
MAX_TURN = MAX_EVENTS = 1000
"""Messages, and events of connections, that are taken before main does something else."""


# From a node to node 0.


class Ask(msgspec.Struct, tag=True, frozen=True):
    """May I take part? Said every second until it is answered.

    Attributes:
        node: which one this is.
        shape: what must be as on node 0.
        addresses: of its sockets, by name.
        pids: process ids of its ranks, by their place in the table of ranks.
    """

    node: int
    shape: Shape
    addresses: dict[str, Address]
    pids: dict[int, int]


class Pulse(msgspec.Struct, frozen=True, array_like=True):
    """What a rank or follower shows on its node's state page; as in `StatePage.relay_rank`."""

    rank: int
    epoch: int
    pulse_age_s: float
    phase: str
    phase_age_s: float
    moved_age_s: float
    step: int
    awaits: bool


class NodeBeat(msgspec.Struct, tag=True, frozen=True):
    """I am here.

    Attributes:
        pulses: of its ranks, followers too.
        leaving: it was told to stop and works on until node 0 has drained.
    """

    pulses: list[Pulse]
    leaving: bool = False


class Said(msgspec.Struct, tag=True, frozen=True):
    """What a rank told its main."""

    place: int
    body: dict[str, Any]


class Died(msgspec.Struct, tag=True, frozen=True):
    """A rank has ended with a status as of `Child.status`."""

    place: int
    status: int


class Leaves(msgspec.Struct, tag=True, frozen=True):
    """The node ends by itself, for a reason."""

    reason: str


FromNode: TypeAlias = Ask | NodeBeat | Said | Died | Leaves

# From node 0 to another one.


class Wait(msgspec.Struct, tag=True, frozen=True):
    """Not everybody is there yet."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """You can't take part, for a reason."""

    reason: str


class Go(msgspec.Struct, tag=True, frozen=True):
    """All are there; `addresses` are those of all nodes' sockets."""

    addresses: dict[str, Address]


class HeadBeat(msgspec.Struct, tag=True, frozen=True):
    """Node 0 is here."""


class Order(msgspec.Struct, tag=True, frozen=True):
    """Something for a rank's process: a command as on its line to main, or, without one, its end by SIGKILL."""

    place: int
    body: dict[str, Any] | None = None


class Stacks(msgspec.Struct, tag=True, frozen=True):
    """Have a rank's process write its stacks."""

    place: int


class End(msgspec.Struct, tag=True, frozen=True):
    """The server ends; `status` is the node's exit status."""

    status: int
    reason: str


FromHead: TypeAlias = Wait | Refused | Go | HeadBeat | Order | Stacks | End


REPEATED = (Ask, NodeBeat, Wait, HeadBeat)
"""Messages that may be lost, for they are said again."""


class Wrapped(msgspec.Struct, frozen=True, array_like=True):
    """A message on its way.

    Attributes:
        life: drawn by the sender at its start; that of node 0 is the number of the run.
        number: how many messages have gone to the receiver, this one counted; `REPEATED` ones are not.
        body: msgpack.
    """

    life: bytes
    number: int
    body: msgspec.Raw


_wrapped = msgspec.msgpack.Decoder(Wrapped).decode
_encode = msgspec.msgpack.Encoder().encode
_from_node = msgspec.msgpack.Decoder(FromNode).decode
_from_head = msgspec.msgpack.Decoder(FromHead).decode


class Silence:
    """How long a peer has been silent, in time in which this process ran: who was stopped itself blames nobody."""

    def __init__(self) -> None:
        self._seconds, self._looked = 0.0, time.monotonic()

    def heard(self) -> None:
        """It said something."""
        self._seconds = 0.0

    def look(self, now: float | None = None) -> float:
        """Seconds of silence; to be called about once a beat, when what has come was taken."""
        now = time.monotonic() if now is None else now
        self._seconds += min(now - self._looked, 2 * BEAT_S)
        self._looked = now
        return self._seconds


class Numbers:
    """Whether all has come that one life has sent."""

    def __init__(self) -> None:
        self._last = 0

    def complete(self, number: int, message: FromNode | FromHead) -> bool:
        """Take a message; False if one before it is missing."""
        expected = self._last if isinstance(message, REPEATED) else self._last + 1
        self._last = number
        return number == expected


class LinkEnd:
    """One end of the line: its socket, and who was left in the handshake."""

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._complained = False
        # Events by which a wrong secret shows: whoever has another one is left during the handshake.
        self._monitor = self._socket.get_monitor_socket(
            zmq.Event.HANDSHAKE_SUCCEEDED
            | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
            | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
            | zmq.Event.DISCONNECTED
        )
        self._strangers, self._connected = 0, False

    def strangers(self) -> int:
        """How many connections in a row have failed in their handshake, since one was completed."""
        self._look()
        return self._strangers

    def _look(self) -> None:
        for _ in range(MAX_EVENTS):
            if not self._monitor.poll(0):
                return
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            self._connected = event == zmq.Event.HANDSHAKE_SUCCEEDED
            if event != zmq.Event.DISCONNECTED:
                self._strangers = 0 if self._connected else self._strangers + 1

    def fileno(self) -> int:
        """Descriptor that is readable when something may have come; to be looked at after `take` found nothing."""
        return int(self._socket.getsockopt(zmq.FD))

    def _receive(self) -> list[list[bytes]]:
        # The queue of events is bounded, and libzmq's own thread waits where it is full: without this, a thousand
        # connections of strangers would hold up everybody's.
        self._look()
        found: list[list[bytes]] = []
        with contextlib.suppress(zmq.Again):
            while len(found) < MAX_TURN:
                found.append(self._socket.recv_multipart(zmq.NOBLOCK))
        return found

    def _drop(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("a node said something that can't be read: %s", error)

    def close(self) -> None:
        """Let the last words go, for `LINGER_MS` at most. Twice is harmless."""
        self._context.destroy(LINGER_MS)


class HeadLink(LinkEnd):
    """Node 0's end, of the lines to all nodes. A line is known by the life of its node.

    Args:
        listener: descriptor of a listening socket, which belongs to the link from now on.
        keys: those of this purpose.
        run: number of the run.
    """

    def __init__(self, listener: int, keys: Keys, run: bytes) -> None:
        super().__init__(zmq.ROUTER)
        self._run = run
        self._numbers: dict[bytes, int] = {}
        # A node that comes again on a new connection is the same node; who is not there hears nothing.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._socket.setsockopt(zmq.USE_FD, listener)
        self._socket.bind("tcp://127.0.0.1:0")

    def send(self, life: bytes, message: FromHead) -> bool:
        """Send to one node, without waiting; one that takes nothing for long will miss it.

        Returns:
            False if it is not connected.
        """
        number = self._numbers[life] = self._numbers.get(life, 0) + (not isinstance(message, REPEATED))
        wrapped = _encode(Wrapped(self._run, number, msgspec.Raw(_encode(message))))
        try:
            self._socket.send_multipart([life, wrapped], zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def take(self) -> list[tuple[bytes, int, FromNode]]:
        """What has come, without waiting: the life it is from, its number, and what it says."""
        found = []
        for frames in self._receive():
            try:
                life, wrapped = frames[0], _wrapped(frames[-1])
                if life == wrapped.life:
                    found.append((life, wrapped.number, _from_node(wrapped.body)))
            except (msgspec.DecodeError, IndexError) as error:
                self._drop(error)
        return found


class NodeLink(LinkEnd):
    """Another node's end.

    Args:
        address: of node 0.
        keys: those of this purpose.
        life: drawn at this node's start.
    """

    def __init__(self, address: Address, keys: Keys, life: bytes) -> None:
        super().__init__(zmq.DEALER)
        self._life, self._number = life, 0
        public, secret = zmq.curve_keypair()
        self._socket.setsockopt(zmq.ROUTING_ID, life)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.connect(f"tcp://{address}")

    def connected(self) -> bool:
        """Whether there is a connection to node 0 now."""
        self._look()
        return self._connected

    def send(self, message: FromNode) -> None:
        """Send to node 0, without waiting; if it takes nothing for long it will miss it."""
        self._number += not isinstance(message, REPEATED)
        with contextlib.suppress(zmq.Again):
            self._socket.send(_encode(Wrapped(self._life, self._number, msgspec.Raw(_encode(message)))), zmq.NOBLOCK)

    def take(self) -> list[tuple[bytes, int, FromHead]]:
        """What has come, without waiting: the run it is from, its number, and what it says."""
        found = []
        for frames in self._receive():
            try:
                wrapped = _wrapped(frames[-1])
                found.append((wrapped.life, wrapped.number, _from_head(wrapped.body)))
            except msgspec.DecodeError as error:
                self._drop(error)
        return found
