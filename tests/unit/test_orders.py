"""Orders from a leader to its followers: what arrives is what was sent, and what is wrong is noticed."""

from __future__ import annotations

import zlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import zmq
from servekit.engine.plan import LogprobColumns, Logprobs, Penalties, Plan, SamplingColumns, StepResult
from servekit.messages.envelope import Kind
from servekit.messages.requests import ProfileReq, SetLogLevelReq
from servekit.runtime.ranks import GroupError
from servekit.scheduler.orders import (
    ASK,
    JOINT,
    STEP,
    STOP,
    OfferReceiver,
    OfferSender,
    Order,
    OrderReceiver,
    OrderSender,
    ResultReceiver,
    ResultSender,
)

INTS, FLOATS = np.arange(3), np.arange(3, dtype=np.float32)


def plan(step: int) -> Plan:
    sampling = SamplingColumns(
        FLOATS,
        FLOATS,
        INTS,
        FLOATS,
        np.array([1, 2, 2**64 - 1], np.uint64),
        INTS,
        forbidden=[None, INTS, None],
        penalties=Penalties(INTS, INTS, INTS, FLOATS, FLOATS, FLOATS),
        allowed=[np.array([2**32 - 1], np.uint32), None, None],
    )
    tables = np.arange(12).reshape(3, 4)
    return Plan(step, INTS, INTS, INTS + 1, tables, INTS, sampling, LogprobColumns(INTS, INTS, [None, INTS, None]))


def same(a: object, b: object) -> bool:
    """Whether two plans or parts of them hold the same arrays."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, list):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__dataclass_fields__"):
        return all(same(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)
    return a == b


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/o"


def test_orders_come_as_they_were_sent_in_their_order(address):
    receiver, sender = OrderReceiver(address), OrderSender([address])
    sender.step(plan(1))
    sender.control(Kind.PROFILE, ProfileReq(True))
    sender.step(plan(2))
    sender.control(Kind.SET_LOG_LEVEL, SetLogLevelReq("debug"))
    sender.stop()
    kinds, bodies = zip(*(receiver.next() for _ in range(5)), strict=True)
    assert kinds == (STEP, Kind.PROFILE, STEP, Kind.SET_LOG_LEVEL, STOP)
    assert same(plan(1), bodies[0]) and same(plan(2), bodies[2])
    assert bodies[1] == ProfileReq(True) and bodies[3] == SetLogLevelReq("debug")
    # Torch takes arrays over and may write to them.
    assert bodies[0].ids.flags.writeable
    receiver.close()


class Raw:
    """Sends orders that a sender would not."""

    def __init__(self, address: str) -> None:
        self.receiver = OrderReceiver(address)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.connect(address)
        # What a sender would send, as it goes over a line of its own.
        line = OrderReceiver(address + "2")
        sender = OrderSender([address + "2"])
        for step in (1, 2):
            sender.step(plan(step))
        heard = [line._socket.recv() for _ in range(2)]
        sender.close()
        line.close()
        self.orders = [msgspec.msgpack.decode(order, type=Order) for order in heard]

    def hear(self, order: Order | bytes) -> object:
        self._socket.send(order if isinstance(order, bytes) else msgspec.msgpack.encode(order))
        return self.receiver.next()

    def close(self) -> None:
        self._context.destroy(0)
        self.receiver.close()


@pytest.fixture
def raw(address):
    made = Raw(address)
    yield made
    made.close()


def test_what_is_not_the_next_order_is_noticed(raw):
    first, second = raw.orders
    assert raw.hear(first)[0] == STEP
    for wrong, said in (
        (first, "order 1 came behind order 1"),
        (msgspec.structs.replace(second, number=3), "order 3 came behind order 1"),
        (msgspec.structs.replace(second, body=second.body[:-1] + b"\0"), "order 2 was damaged"),
        (b"garbage", "can't be read"),
    ):
        with pytest.raises(GroupError, match=said):
            raw.hear(wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"step": 5}, r"step 5 \(1\) came behind step 0"), ({"rows": 2}, "step 1 should have 2 rows, not 3")],
)
def test_a_step_that_does_not_fit_its_head_is_noticed(raw, change, said):
    with pytest.raises(GroupError, match=said):
        raw.hear(msgspec.structs.replace(raw.orders[0], **change))


def test_a_skipped_step_is_noticed(raw):
    body = raw.orders[1].body
    order = Order(1, STEP, 2, 3, zlib.crc32(body), body)
    with pytest.raises(GroupError, match=r"step 2 \(2\) came behind step 0"):
        raw.hear(order)


def test_results_come_back_and_belong_to_their_step(address):
    receiver, sender = ResultReceiver(address), ResultSender(address)
    result = StepResult(np.array([[5], [-1]]), Logprobs(FLOATS, FLOATS[None], INTS[None], [FLOATS]))
    sender.send(1, result)
    assert same(result, receiver.next(1))
    sender.send(2, replace(result, logprobs=None))
    with pytest.raises(GroupError, match="tokens of step 2 came where those of step 3 were due"):
        receiver.next(3)
    sender.close()
    receiver.close()


def test_leaders_are_asked_and_all_are_told_of_all_plans(tmp_path):
    leader, follower, back = (f"ipc://{tmp_path}/{name}" for name in "lfb")
    receivers = [OrderReceiver(leader), OrderReceiver(follower)]
    sender, offers, offering = OrderSender([leader, follower], [0]), OfferReceiver(back), OfferSender(back, 1)
    for step in (1, 2):
        offering.want()
        sender.ask()
        assert receivers[0].next() == (ASK, None)
        offering.answer(plan(step + 7) if step == 1 else None)
        assert offers.next() == (1, False, None)
        dp, answer, found = offers.next()
        assert (dp, answer) == (1, True) and same(found, plan(8) if step == 1 else None)
        # A data-parallel rank counts its own steps; the group counts those of all.
        sender.joint([plan(step), found])
        for receiver in receivers:
            kind, plans = receiver.next()
            assert kind == JOINT and same(plans, [plan(step), found])
    for end in (*receivers, sender, offers, offering):
        end.close()
