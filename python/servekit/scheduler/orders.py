"""What the leader of a group tells its followers: each step's plan once, and what must happen between two steps.

Orders are numbered, and one that is missing, doubled or damaged is noticed before its step enters a collective, where
it would make everybody wait. Followers that have nothing to do sleep on their socket.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from servekit.config.secrets import Keys
from servekit.engine.plan import Plan, StepResult
from servekit.messages.envelope import Kind
from servekit.messages.requests import ProfileReq, SetLogLevelReq
from servekit.runtime.ranks import GroupError
from servekit.transport.between_nodes import connect, listen

STEP, STOP, ASK, JOINT = 0, -1, -2, -3
"""Kinds of orders; any other is the kind of a control message. `ASK` is for leaders: what they would compute next."""
_BODIES: dict[int, Any] = {
    STEP: Plan,
    STOP: None,
    ASK: None,
    JOINT: list[Plan | None],
    Kind.PROFILE: ProfileReq,
    Kind.SET_LOG_LEVEL: SetLogLevelReq,
}
LINGER_MS = 500
"""How long `close` lets ZeroMQ deliver what was sent."""
FOLLOWED = (Kind.PROFILE, Kind.SET_LOG_LEVEL)
"""Control messages that concern every process of a group."""


class Order(msgspec.Struct, array_like=True, frozen=True):
    """One order.

    Attributes:
        number: from 1, without gaps.
        kind: `STEP`, `STOP`, `ASK`, `JOINT` or a `Kind`.
        step, rows: of the plan, else 0; of several plans, which one it is in their common count, and all their rows.
        digest: CRC-32 of the body.
        body: msgpack.
    """

    number: int
    kind: int
    step: int
    rows: int
    digest: int
    body: bytes


def _pack(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _unpack(kind: type, packed: Any) -> Any:
    # A copy, for torch wants to be able to write to it.
    return np.frombuffer(packed[2], packed[0]).reshape(packed[1]).copy()


_encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
_decode_order = msgspec.msgpack.Decoder(Order).decode
_decode_result = msgspec.msgpack.Decoder(tuple[int, StepResult], dec_hook=_unpack).decode
_decode_offer = msgspec.msgpack.Decoder(tuple[int, bool, Plan | None], dec_hook=_unpack).decode
_decoders = {kind: msgspec.msgpack.Decoder(body, dec_hook=_unpack) for kind, body in _BODIES.items()}


class _End:
    """One end of a line: its sockets, and their end.

    All are given an address as of `PortArgs`; where the other end may be on another node, the keys of the sockets
    between nodes; and to receive from there, the descriptor of a TCP socket that listens.
    """

    def __init__(self, keys: Keys | None) -> None:
        self._context, self._keys = zmq.Context(), keys

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, LINGER_MS)
        # The peer takes what is sent before it ends, or it is dead, and its main ends this process too.
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, 0)
        # All processes start together, so the peer's socket is often a moment late.
        sock.setsockopt(zmq.RECONNECT_IVL, 10)
        return sock

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        sock = self._open(zmq.PUSH)
        connect(sock, address, self._keys)
        return sock

    def _listen(self, address: str, listener: int | None) -> zmq.Socket[bytes]:
        sock = self._open(zmq.PULL)
        listen(sock, address, listener, self._keys)
        return sock

    def close(self) -> None:
        """Deliver what was sent, for `LINGER_MS` at most, and let go of the sockets."""
        self._context.destroy(LINGER_MS)


class OrderSender(_End):
    """The leader's end.

    Args:
        addresses: of its followers' sockets.
        leaders: which of these are leaders of other data-parallel ranks.
    """

    def __init__(self, addresses: Sequence[str], leaders: Sequence[int] = (), keys: Keys | None = None) -> None:
        super().__init__(keys)
        self._sockets = [self._connect(address) for address in addresses]
        self._numbers = [0] * len(addresses)
        self._leaders, self._joint = leaders, 0

    def step(self, plan: Plan) -> None:
        """Tell of the next step."""
        self._send(STEP, plan, plan.step, len(plan.counts))

    def ask(self) -> None:
        """Ask the other leaders for their plans."""
        self._send(ASK, None, to=self._leaders)

    def joint(self, plans: list[Plan | None]) -> None:
        """Tell of the next step of all data-parallel ranks."""
        self._joint += 1
        self._send(JOINT, plans, self._joint, sum(len(plan.counts) for plan in plans if plan is not None))

    def control(self, kind: Kind, body: Any) -> None:
        """Tell of a control message of `FOLLOWED`."""
        self._send(int(kind), body)

    def stop(self) -> None:
        """Tell that there will be no more, and close."""
        self._send(STOP, None)
        self.close()

    def _send(self, kind: int, body: Any, step: int = 0, rows: int = 0, to: Sequence[int] | None = None) -> None:
        packed = _encode(body)
        digest = zlib.crc32(packed)
        for each in range(len(self._sockets)) if to is None else to:
            self._numbers[each] += 1
            self._sockets[each].send(_encode(Order(self._numbers[each], kind, step, rows, digest, packed)))


class OrderReceiver(_End):
    """A follower's end.

    Args:
        address: to bind its socket to.
    """

    def __init__(self, address: str, listener: int | None = None, keys: Keys | None = None) -> None:
        super().__init__(keys)
        self._socket = self._listen(address, listener)
        self._number = self._step = 0

    def next(self) -> tuple[int, Any]:
        """Wait for the next order; its kind and its body.

        Raises:
            GroupError: it is another one than should come next.
        """
        try:
            order = _decode_order(self._socket.recv())
            if order.number != self._number + 1:
                raise GroupError(f"order {order.number} came behind order {self._number}")
            if zlib.crc32(order.body) != order.digest:
                raise GroupError(f"order {order.number} was damaged on its way")
            self._number = order.number
            body = _decoders[order.kind].decode(order.body)
        except (msgspec.DecodeError, KeyError) as error:
            raise GroupError(f"an order can't be read: {error}") from error
        if order.kind == STEP:
            self._check(order, [body], body.step)
        elif order.kind == JOINT:
            self._check(order, [plan for plan in body if plan is not None], order.step)
        return order.kind, body

    def _check(self, order: Order, plans: Sequence[Plan], step: int) -> None:
        if not order.step == step == self._step + 1:
            raise GroupError(f"step {order.step} ({step}) came behind step {self._step}")
        for columns in zip(*((plan.counts, plan.starts, plan.tables) for plan in plans), strict=True):
            if (found := sum(map(len, columns))) != order.rows:
                raise GroupError(f"step {order.step} should have {order.rows} rows, not {found}")
        self._step = step


class OfferSender(_End):
    """Another leader's end of the way to the first one.

    Args:
        address: of the first leader's socket.
        dp: whose offers these are.
    """

    def __init__(self, address: str, dp: int, keys: Keys | None = None) -> None:
        super().__init__(keys)
        self._socket, self._dp = self._connect(address), dp

    def want(self) -> None:
        """Ask for a step, for there is something new."""
        self._socket.send(_encode((self._dp, False, None)))

    def answer(self, plan: Plan | None) -> None:
        """Say what is to be computed next, in answer to an `ASK`."""
        self._socket.send(_encode((self._dp, True, plan)))


class OfferReceiver(_End):
    """The first leader's end of it."""

    def __init__(self, address: str, listener: int | None = None, keys: Keys | None = None) -> None:
        super().__init__(keys)
        self._socket = self._listen(address, listener)

    def next(self) -> tuple[int, bool, Plan | None]:
        """Wait for the next word: whose it is, whether it is an answer, and the plan of one that has some."""
        return _decode_offer(self._socket.recv())


class ResultSender(_End):
    """The last stage's end of the way back: what its first rank sampled."""

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        super().__init__(keys)
        self._socket = self._connect(address)

    def send(self, step: int, result: StepResult) -> None:
        """Send what a step brought."""
        self._socket.send(_encode((step, result)))


class ResultReceiver(_End):
    """The leader's end of it.

    Args:
        address, listener: to bind its socket to, see `_listen`.
        keys: see `_End`.
        awaits: called with True when the wait for a result begins, and with False when it ends.
    """

    def __init__(
        self,
        address: str,
        listener: int | None = None,
        keys: Keys | None = None,
        awaits: Callable[[bool], None] = lambda peers: None,
    ) -> None:
        super().__init__(keys)
        self._awaits = awaits
        self._socket = self._listen(address, listener)

    def next(self, step: int) -> StepResult:
        """Wait for what a step brought.

        Raises:
            GroupError: another step's came.
        """
        self._awaits(True)
        found, result = _decode_result(self._socket.recv())
        self._awaits(False)
        if found != step:
            raise GroupError(f"tokens of step {found} came where those of step {step} were due")
        return result
