"""The one way to send on a link: every frame leaves with a return address, an epoch and a number."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq

from servekit.messages.envelope import Envelope, Kind, encode_envelope, name_exts

HIGH_WATER_MARK = 16384
"""Most messages that wait for a peer that does not read; then `send` raises `LinkFull`."""

# Plain numbers: `|` of pyzmq's own makes an enum member each time.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class LinkFull(Exception):
    """The peer has not read for so long that the link's queue is full."""


@dataclass(frozen=True)
class Link:
    """Who speaks to whom.

    Attributes:
        sender: worker number or rank of this side.
        sender_epoch: life of this process.
        receiver_epoch: life of the peer; frames for another life are dropped by it.
        name: what this process is called, for the HELLO.
        schema: hash of the message definitions this build speaks.
        build: version of this build, for the HELLO.
    """

    sender: int
    sender_epoch: int
    receiver_epoch: int
    name: str
    schema: int
    build: str


class SenderWrapper:
    """A PUSH socket that stamps what it sends. The first frame is a HELLO; frames are numbered from 1.

    The wrapped socket is not shared: one thread sends.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: str | os.PathLike[str], link: Link) -> None:
        """Connect to the ipc socket at `path`, which need not exist yet, and send the HELLO."""
        self.link = link
        self.sent = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(f"ipc://{os.fspath(path)}")
        self.send(Envelope(Kind.HELLO, schema=link.schema, exts=name_exts(link.name, link.build)), None)

    def send(self, envelope: Envelope, body: object, attachments: Sequence[bytes] = ()) -> None:
        """Stamp the envelope (it is changed in place), encode both, and queue the message; never blocks.

        Raises:
            LinkFull: the peer does not read; nothing was sent.
        """
        envelope.sender = self.link.sender
        envelope.sender_epoch = self.link.sender_epoch
        envelope.receiver_epoch = self.link.receiver_epoch
        envelope.seq = self.sent + 1
        frames = [encode_envelope(envelope), self._encoder.encode(body), *attachments]
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, _MORE)
            self._socket.send(frames[-1], _LAST)
        except zmq.Again:
            # Only a first frame can find the queue full: a message is queued as a whole.
            raise LinkFull(f"{self.link.name}: {HIGH_WATER_MARK} messages wait to be read") from None
        self.sent += 1

    def close(self) -> None:
        """Close the socket; what is queued has half a second to leave."""
        self._socket.close()
