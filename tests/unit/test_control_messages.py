"""A worker's control messages: who is asked, who answered in time, and what became of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from servekit.messages.envelope import Envelope, Kind, party_of_worker, party_title
from servekit.messages.requests import ControlReply, GetStateReq, PauseReq, SetLogLevelReq
from servekit.tokenizer.control_messages import Answers, ControlMessages
from servekit.transport.sender import LinkFull

encode = msgspec.msgpack.encode


class FakeSender:
    """Keeps what is sent, and lets a script answer it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Envelope, Any]] = []
        self.full = False
        self.answer: Callable[[Envelope], None] = lambda envelope: None

    def send(self, envelope: Envelope, body: Any) -> None:
        if self.full:
            raise LinkFull("nobody reads")
        self.sent.append((envelope, body))
        self.answer(envelope)


class Asking:
    """Control messages of worker 3 over a fake link."""

    def __init__(self) -> None:
        self.sender = FakeSender()
        ids = iter(range(100, 200))
        self.messages = ControlMessages(3, self.sender, lambda: next(ids))  # type: ignore[arg-type]

    def reply(self, id_: int, number: int, reply: ControlReply) -> None:
        self.messages.take_reply(Envelope(Kind.CONTROL_REPLY, id_, rank=number), [encode(reply)])

    def ask(self, kind: Kind = Kind.GET_STATE, deadline_s: float = 5.0) -> Answers:
        return asyncio.run(self.messages.ask(kind, GetStateReq() if kind == Kind.GET_STATE else PauseReq(), deadline_s))


@pytest.fixture
def asking() -> Asking:
    return Asking()


def test_everybody_that_was_asked_is_heard(asking: Asking) -> None:
    def answer(envelope: Envelope) -> None:
        # A rank may be quicker than the answer that names it.
        asking.reply(envelope.id, 1, ControlReply(True, data=b'{"rank": 1}'))
        asking.reply(envelope.id, -1, ControlReply(True, asked=[0, 1, party_of_worker(2)]))
        asking.reply(envelope.id, 0, ControlReply(True))
        asking.reply(envelope.id, party_of_worker(2), ControlReply(True))

    asking.sender.answer = answer
    answers = asking.ask()
    assert answers.ok and answers.silent == [] and answers.failures() == []
    assert sorted(answers.replies) == [-4, -1, 0, 1]
    assert answers.data() == {1: {"rank": 1}, -1: None, 0: None, -4: None}


def test_who_does_not_answer_in_time_is_named(asking: Asking) -> None:
    def answer(envelope: Envelope) -> None:
        asking.reply(envelope.id, -1, ControlReply(True, asked=[0, 1, -2]))
        asking.reply(envelope.id, 0, ControlReply(False, "it is busy"))

    asking.sender.answer = answer
    answers = asking.ask(Kind.PAUSE, 0.05)
    assert not answers.ok
    assert answers.silent == [-2, 1] and answers.no_answer == ["http[0]", "scheduler[dp=1]"]
    assert answers.failures() == [
        "scheduler[dp=0]: it is busy",
        "http[0] did not answer in time",
        "scheduler[dp=1] did not answer in time",
    ]


def test_a_silent_control_process_is_named_too(asking: Asking) -> None:
    assert asking.ask(deadline_s=0.02).no_answer == ["control"]
    asking.sender.full = True
    assert asking.ask(deadline_s=60).no_answer == ["control"]


def test_answers_to_other_questions_are_nothing(asking: Asking) -> None:
    def answer(envelope: Envelope) -> None:
        asking.reply(envelope.id - 1, 5, ControlReply(True))
        asking.reply(envelope.id, -1, ControlReply(True))

    asking.sender.answer = answer
    assert list(asking.ask().replies) == [-1]
    asking.reply(100, 0, ControlReply(True))
    with pytest.raises(msgspec.DecodeError):
        asking.messages.take_reply(Envelope(Kind.CONTROL_REPLY, 1), [b"\xc0"])


def test_a_log_level_is_obeyed_and_answered(asking: Asking) -> None:
    root = logging.getLogger()
    before = root.level
    try:
        for level, ok in (("warning", True), ("debug", True), ("loud", False)):
            asking.messages.take_log_level(Envelope(Kind.SET_LOG_LEVEL, 9), [encode(SetLogLevelReq(level))])
            envelope, reply = asking.sender.sent[-1]
            assert (envelope.kind, envelope.id, envelope.rank) == (Kind.CONTROL_REPLY, 9, -5)
            assert reply.ok == ok and (ok or "'loud' is no log level" in reply.message)
        assert root.level == logging.DEBUG
    finally:
        root.setLevel(before)


def test_everyone_has_a_name() -> None:
    names = [party_title(number) for number in (0, 7, -1, party_of_worker(0), party_of_worker(11))]
    assert names == ["scheduler[dp=0]", "scheduler[dp=7]", "control", "http[0]", "http[11]"]
