"""A rank's two sockets: requests come in, steps go out. Every engine speaks to the control process through this class.

One thread owns a link, the one that runs the engine; only `wake` may be called from others. Nothing that arrives can
raise out of it: what is malformed is logged once per kind, counted, and answered with an error row if it was a request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from typing import TYPE_CHECKING, Any, cast

import msgspec
import zmq

from servekit.config.port_args import EGRESS, PortArgs, rank_ipc
from servekit.config.secrets import Keys
from servekit.messages import requests as r
from servekit.messages.batches import BatchEmbeddingOutput, BatchTokenIDOutput, FinishReason
from servekit.messages.columns import schema_hash
from servekit.messages.envelope import (
    Envelope,
    EnvelopeError,
    Ext,
    Kind,
    Load,
    decode_envelope,
    encode_envelope,
    name_exts,
)
from servekit.transport.between_nodes import connect

if TYPE_CHECKING:
    from servekit._core import Pulse

logger = logging.getLogger("servekit.transport")

HIGH_WATER_MARK = 65536
"""Messages that may wait on one side of a socket; then the sender waits."""
SEND_TIMEOUT_S = 10.0
"""How long a full socket may stay full before the link counts as dead."""
REPEAT_S = 0.5
"""A rank that has requests and waits repeats its load that often, for nobody could tell it from one that is stuck."""
LINGER_MS = 500
"""How long `close` lets ZeroMQ deliver what was sent."""
MAX_BURST = 4096
"""Messages that one `receive` returns at most, so that a flood can't keep a step from starting."""

_HEAD_FLAGS = zmq.NOBLOCK | zmq.SNDMORE
_REQUESTS = (Kind.GENERATE, Kind.EMBEDDING)
_BODIES: dict[Kind, type[msgspec.Struct]] = {
    Kind.GENERATE: r.TokenizedGenerateReqInput,
    Kind.EMBEDDING: r.TokenizedEmbeddingReqInput,
    Kind.ABORT: r.AbortReq,
    Kind.PROFILE: r.ProfileReq,
    Kind.FLUSH_CACHE: r.FlushCacheReq,
    Kind.PAUSE: r.PauseReq,
    Kind.CONTINUE: r.ContinueReq,
    Kind.SET_LOG_LEVEL: r.SetLogLevelReq,
    Kind.GET_STATE: r.GetStateReq,
    Kind.ACTIVE_RANKS: r.ActiveRanksOutput,
}


class LinkError(RuntimeError):
    """The control process speaks another schema, or takes nothing, or was lost: this rank can't go on."""


class RankLink:
    """The link of one rank to the control process.

    Attributes:
        last_dispatch: highest dispatch number that has arrived.
        dropped: messages that were malformed or of a kind that no rank handles.
        fenced: messages from or for another life of either process.
        resting: what an engine that has requests does while it waits here: nothing (idle), or it needs others of its
            group (waiting).
    """

    def __init__(
        self,
        ports: PortArgs,
        rank: int,
        epoch: int,
        title: str,
        build: str,
        pulse: Pulse | None = None,
        keys: Keys | None = None,
    ) -> None:
        """Connect both sockets and greet the control process.

        Args:
            ports: addresses and epochs.
            rank: this rank's number.
            epoch: this rank's life.
            title: process title, for the greeting.
            build: which build this is, for the greeting.
            pulse: where it is shown what the engine does; None shows it nowhere.
            keys: of the sockets between nodes, if control is on another one.
        """
        self.last_dispatch = self.dropped = self.fenced = 0
        self.resting = "idle"
        self._rank, self._epoch, self._control_epoch = rank, epoch, ports.control_epoch
        self._exts, self._schema = name_exts(title, build), schema_hash()
        self._seq = self._step = self._reported = 0
        self._load = Load()
        self._pulse, self._computed = pulse, 0
        self._keys, self._is_remote, self._heard = keys, EGRESS in ports.tcp, 0
        self._logged: set[str] = set()
        self._decoders = {kind: msgspec.msgpack.Decoder(body) for kind, body in _BODIES.items()}
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._pull = self._socket(zmq.PULL, ports.address(rank_ipc(rank)))
        self._push = self._socket(zmq.PUSH, ports.address(EGRESS))
        self._wake_reader, self._wake_writer = os.pipe()
        for fd in (self._wake_reader, self._wake_writer):
            os.set_blocking(fd, False)
        self._readable: list[int] = [cast(int, self._pull.getsockopt(zmq.FD)), self._wake_reader]
        self._greet()

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        # All processes start together, so the peer's socket is often a moment late.
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        connect(socket, address, self._keys)
        return socket

    def enter(self, phase: str, step: int | None = None) -> None:
        """Say what the engine does from now on, for those who watch it; `receive` says idle and working by itself.

        Args:
            phase: computing while it waits for a device, working when that is done; see `Pulse.enter`.
            step: the step that it is about, the last one if not given.
        """
        if self._pulse is not None:
            self._computed = self._computed if step is None else step
            self._pulse.enter(phase, self._computed)

    def moved(self) -> None:
        """Say that the engine gets ahead with what it does, for those who watch it; `send_batch` says so by itself."""
        if self._pulse is not None:
            self._pulse.moved()

    # Receiving

    def receive(self, timeout_s: float | None) -> list[tuple[Envelope, Any]]:
        """Messages that have arrived, with their decoded bodies (the structs of `messages/requests.py`).

        Args:
            timeout_s: how long to wait for the first one, precise to some 0.1 ms; None waits for ever.

        Returns:
            Everything available, in order; [] when the time has passed or `wake` was called.

        Raises:
            LinkError: the control process speaks another schema, or is on another node and messages of it were lost.
        """
        found = self._take()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        rests = False
        while not found:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            has_requests = self._load.running + self._load.waiting > 0
            repeats = has_requests and (left is None or left > REPEAT_S)
            # The descriptor reports changes only: it is safe to wait on after `_take` has emptied the socket.
            if not rests:
                rests = True
                self.enter(self.resting if has_requests else "idle")
            ready, _, _ = select.select(self._readable, [], [], REPEAT_S if repeats else left)
            if not ready and repeats:
                self._send_batch(BatchTokenIDOutput(rids=[]), self._load, self._reported)
                continue
            if not ready:
                break
            found = self._take()
            if self._wake_reader in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_reader, 4096)
                break
        if rests:
            self.enter("working")
        return found

    def _take(self) -> list[tuple[Envelope, Any]]:
        found: list[tuple[Envelope, Any]] = []
        # Asking is cheaper than the exception of an empty socket, and that is the usual case.
        while len(found) < MAX_BURST and self._pull.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator, arg-type]
            message = self._open(self._pull.recv_multipart(zmq.NOBLOCK))
            if message is not None:
                found.append(message)
        return found

    def _open(self, frames: list[bytes]) -> tuple[Envelope, Any] | None:
        """Check and decode one message; None if it is not for the engine."""
        try:
            envelope = decode_envelope(frames[0])
        except EnvelopeError as error:
            self._drop("envelope", f"dropped a message with a broken envelope: {error}")
            return None
        if envelope.kind == Kind.HELLO:
            self._meet(envelope)
            return None
        if envelope.receiver_epoch != self._epoch or envelope.sender_epoch != self._control_epoch:
            self.fenced += 1
            return None
        if self._is_remote:
            # A connection between nodes may break, and ZeroMQ makes a new one without a word of what was lost.
            if envelope.seq != self._heard + 1:
                raise LinkError(f"messages {self._heard + 1} to {envelope.seq - 1} of the control process were lost")
            self._heard = envelope.seq
        if envelope.kind in _REQUESTS:
            self.last_dispatch = max(self.last_dispatch, envelope.dispatch)
        decoder = self._decoders.get(envelope.kind)
        if decoder is None:
            self._drop(envelope.kind.name, f"dropped a message of kind {envelope.kind.name}, which no rank handles")
            return None
        try:
            body: Any = decoder.decode(frames[1])
            if envelope.kind == Kind.GENERATE and len(frames) > 2:
                # The router adds it when it sends a request again, without opening the body.
                body.resume_output_ids = frames[2]
            _check(envelope, body)
        except (msgspec.DecodeError, IndexError, ValueError) as error:
            self._drop(envelope.kind.name, f"a {envelope.kind.name} message has a malformed body: {error}")
            if envelope.kind in _REQUESTS:
                self._refuse(envelope, str(error))
            return None
        return envelope, body

    def _drop(self, what: str, line: str) -> None:
        self.dropped += 1
        if what not in self._logged:
            self._logged.add(what)
            logger.warning("%s", line)

    def _refuse(self, envelope: Envelope, why: str) -> None:
        """Close a request that no engine will ever see."""
        reason = FinishReason("error", message=f"the rank can't read the request: {why}", status=400)
        batch: BatchTokenIDOutput | BatchEmbeddingOutput
        if envelope.kind == Kind.EMBEDDING:
            batch = BatchEmbeddingOutput(rids=[envelope.id], finished_reasons=[reason], embeddings=[b""])
        else:
            batch = BatchTokenIDOutput(rids=[envelope.id], finished_reasons=[reason], decode_ids=[b""])
        self.send_batch(batch, None)

    def _meet(self, hello: Envelope) -> None:
        """Check a greeting; a later life of the control process is greeted in turn."""
        if hello.sender_epoch < self._control_epoch:
            self.fenced += 1
            return
        if hello.schema != self._schema:
            name, build = (hello.ext(ext) or b"?" for ext in (Ext.NAME, Ext.BUILD))
            raise LinkError(
                f"{name.decode(errors='replace')} (build {build.decode(errors='replace')}) speaks message schema "
                f"{hello.schema:016x}, this rank {self._schema:016x}: both must come from one build"
            )
        self._heard = hello.seq
        if hello.sender_epoch > self._control_epoch:
            self._control_epoch = hello.sender_epoch
            self._seq = self.last_dispatch = self._reported = 0
            self._greet()

    # Sending

    def send_batch(
        self, batch: BatchTokenIDOutput | BatchEmbeddingOutput, load: Load | None, last_dispatch: int | None = None
    ) -> None:
        """Send one step's rows, or none, with the rank's load after that step.

        Args:
            batch: columns of one step; `rids` may be empty to report a load alone.
            load: what the rank holds now; None reports nothing.
            last_dispatch: highest dispatch number that `load` counts; None is the highest that has arrived.

        Raises:
            LinkError: the control process has taken nothing for `SEND_TIMEOUT_S`.
        """
        self._send_batch(batch, load, last_dispatch)
        self.moved()

    def _send_batch(
        self, batch: BatchTokenIDOutput | BatchEmbeddingOutput, load: Load | None, last_dispatch: int | None
    ) -> None:
        self._step += 1
        if batch.dp_ranks is None:
            # Answers say which rank made them, and only the link knows it in every engine.
            batch.dp_ranks = [self._rank] * len(batch.rids)
        kind = Kind.BATCH_EMBEDDING if isinstance(batch, BatchEmbeddingOutput) else Kind.BATCH_TOKEN_ID
        if load is not None:
            # A number says what the load beside it counts, so it moves only together with one.
            self._reported = self.last_dispatch if last_dispatch is None else last_dispatch
            self._load = load
        envelope = Envelope(
            kind, self._step, rank=self._rank, rows=len(batch.rids), last_dispatch=self._reported, load=load
        )
        self._send(envelope, self._encoder.encode(batch))

    def reply(self, request: Envelope, reply: r.ControlReply) -> None:
        """Answer a control message.

        Raises:
            LinkError: the control process has taken nothing for `SEND_TIMEOUT_S`.
        """
        self._send(Envelope(Kind.CONTROL_REPLY, request.id, rank=self._rank), self._encoder.encode(reply))

    def send_raw(self, envelope: Envelope, body: bytes) -> None:
        """Send any body under an envelope, its epochs and number filled in; for engines that test what others bear."""
        self._send(envelope, body)

    def _greet(self) -> None:
        self._send(Envelope(Kind.HELLO, schema=self._schema, exts=self._exts), b"\xc0")

    def _send(self, envelope: Envelope, body: bytes) -> None:
        self._seq += 1
        envelope.seq, envelope.sender, envelope.sender_epoch = self._seq, self._rank, self._epoch
        envelope.receiver_epoch = 0 if envelope.kind == Kind.HELLO else self._control_epoch
        head = encode_envelope(envelope)
        try:
            self._push.send(head, _HEAD_FLAGS)
        except zmq.Again:
            if not self._push.poll(int(SEND_TIMEOUT_S * 1000), zmq.POLLOUT):
                raise LinkError(f"the control process has taken nothing for {SEND_TIMEOUT_S:g} s") from None
            self._push.send(head, _HEAD_FLAGS)
        # Room is counted in messages: once the first frame is taken, the last one is.
        self._push.send(body, zmq.NOBLOCK)

    def wake(self) -> None:
        """Make `receive` return; from any thread."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_writer, b"\0")

    def close(self) -> None:
        """Deliver what was sent, for `LINGER_MS` at most, and let go of the sockets."""
        self._pull.close(0)
        self._push.close()
        self._context.term()
        os.close(self._wake_reader)
        os.close(self._wake_writer)


def _check(envelope: Envelope, body: Any) -> None:
    """What the types of a body do not say."""
    if envelope.kind in _REQUESTS:
        if body.rid != envelope.id:
            raise ValueError(f"its id is {body.rid}, its envelope's {envelope.id}")
        if not body.input_ids or len(body.input_ids) % 4:
            raise ValueError(f"{len(body.input_ids)} bytes of input ids are no list of u32")
    elif envelope.kind == Kind.ABORT and body.rid != envelope.id:
        raise ValueError(f"its id is {body.rid}, its envelope's {envelope.id}")
