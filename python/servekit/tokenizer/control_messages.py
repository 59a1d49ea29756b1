"""Control messages: one question of this worker to every rank, and who answered it in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from servekit.messages.envelope import Envelope, Kind, party_of_worker, party_title
from servekit.messages.requests import ControlReply, SetLogLevelReq
from servekit.runtime.logs import set_level
from servekit.transport.sender import LinkFull, SenderWrapper

log = logging.getLogger(__name__)

CONTROL = -1
"""The control process among those that answer; ranks have their number, workers `party_of_worker`."""


@dataclass(frozen=True)
class Answers:
    """What became of a control message.

    Attributes:
        replies: who answered, by number (see `party_title`), the control process included.
        silent: who was asked and did not answer in time, by number. A silent control process named nobody else.
    """

    replies: dict[int, ControlReply]
    silent: list[int]

    @property
    def ok(self) -> bool:
        """Whether everybody that was asked answered, and obeyed."""
        return not self.silent and all(reply.ok for reply in self.replies.values())

    @property
    def no_answer(self) -> list[str]:
        """Names of those that did not answer."""
        return [party_title(number) for number in self.silent]

    def failures(self) -> list[str]:
        """One line for each that did not obey or answer."""
        refused = [
            f"{party_title(number)}: {reply.message or 'failed'}"
            for number, reply in sorted(self.replies.items())
            if not reply.ok
        ]
        return [*refused, *(f"{name} did not answer in time" for name in self.no_answer)]

    def data(self) -> dict[int, Any]:
        """What each told, decoded; None for those that told nothing.

        Raises:
            msgspec.DecodeError: somebody's data is no JSON.
        """
        return {
            number: msgspec.json.decode(reply.data) if reply.data else None for number, reply in self.replies.items()
        }


class ControlMessages:
    """Sends a worker's control messages, gathers their answers, and obeys those of other workers.

    Everything runs on the worker's event loop.

    Args:
        worker: which worker this is.
        sender: link to the control process.
        mint: makes a correlation id, which is the return address.
    """

    def __init__(self, worker: int, sender: SenderWrapper, mint: Callable[[], int]) -> None:
        self._worker = worker
        self._sender = sender
        self._mint = mint
        self._asked: dict[int, asyncio.Queue[tuple[int, ControlReply]]] = {}
        self._reply = msgspec.msgpack.Decoder(ControlReply)
        self._level = msgspec.msgpack.Decoder(SetLogLevelReq)

    async def ask(self, kind: Kind, body: msgspec.Struct, deadline_s: float) -> Answers:
        """Ask every active rank, and whom else the kind concerns.

        The control process answers first: with its own reply, and with whom it has asked.

        Args:
            kind: of the message; the control process refuses those that it does not know.
            body: struct of that kind.
            deadline_s: seconds after which whoever has not answered is named as silent.
        """
        correlation = self._mint()
        queue: asyncio.Queue[tuple[int, ControlReply]] = asyncio.Queue()
        self._asked[correlation] = queue
        expected = {CONTROL}
        replies: dict[int, ControlReply] = {}
        try:
            self._sender.send(Envelope(kind, correlation), body)
            async with asyncio.timeout(deadline_s):
                while not expected <= replies.keys():
                    number, reply = await queue.get()
                    replies[number] = reply
                    expected.update(reply.asked)
        except TimeoutError:
            pass
        except LinkFull as error:
            log.error("a control message could not be sent: %s", error)
        finally:
            del self._asked[correlation]
        return Answers(replies, sorted(expected - replies.keys()))

    def take_reply(self, envelope: Envelope, frames: Sequence[bytes]) -> None:
        """Somebody's answer; one that nobody waits for any more is nothing.

        Raises:
            msgspec.DecodeError: the body is no reply.
        """
        reply = self._reply.decode(frames[0])
        queue = self._asked.get(envelope.id)
        if queue is not None:
            queue.put_nowait((envelope.rank, reply))

    def take_log_level(self, envelope: Envelope, frames: Sequence[bytes]) -> None:
        """Obey a message that asks every process to log more, or less.

        Raises:
            msgspec.DecodeError: the body is no such message.
        """
        request = self._level.decode(frames[0])
        reply = ControlReply(True)
        try:
            set_level(request.level)
        except ValueError as error:
            reply = ControlReply(False, str(error))
        self.reply(envelope, reply)

    def reply(self, envelope: Envelope, reply: ControlReply) -> None:
        """Answer a control message in this worker's name."""
        try:
            self._sender.send(Envelope(Kind.CONTROL_REPLY, envelope.id, rank=party_of_worker(self._worker)), reply)
        except LinkFull as error:
            log.error("a reply could not be sent: %s", error)
