"""Leaders that share out attention by sequences: each has its own requests, and all compute one step together.

The first leader begins every step. It asks the others what they would compute, and tells all ranks of all the plans;
who has none takes part all the same, for the layers behind attention are everybody's. A leader that gets a message says
that it wants a step; when nobody has had anything to compute, nobody asks until somebody wants again, and all sleep.
No leader guesses whether another one is awake: only the first decides, and what it decides reaches all in one order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from servekit.engine.plan import Plan
from servekit.runtime.ranks import GroupError
from servekit.scheduler.orders import (
    ASK,
    JOINT,
    STOP,
    OfferReceiver,
    OfferSender,
    OrderReceiver,
    ResultReceiver,
)
from servekit.scheduler.rank import TorchRank

if TYPE_CHECKING:
    from servekit.transport.rank_link import RankLink

_T = TypeVar("_T")


class _Inbox(Generic[_T]):
    """What comes on a socket of the group, so that it wakes a thread that sleeps on the link to control."""

    def __init__(self, receive: Callable[[], _T], link: RankLink) -> None:
        self._receive, self._link = receive, link
        self._queue: SimpleQueue[_T | GroupError] = SimpleQueue()
        threading.Thread(target=self._listen, name="group", daemon=True).start()

    def _listen(self) -> None:
        found: _T | GroupError | None = None
        while not isinstance(found, GroupError):
            try:
                found = self._receive()
            except GroupError as error:
                found = error
            self._queue.put(found)
            self._link.wake()

    @property
    def empty(self) -> bool:
        """Nothing has come."""
        return self._queue.empty()

    def take(self) -> _T:
        """The next thing that came, or comes.

        Raises:
            GroupError: it was wrong.
        """
        found = self._queue.get()
        if isinstance(found, GroupError):
            raise found
        return found


class FirstLeader(TorchRank):
    """The leader of the first data-parallel rank of a replica.

    Args:
        offers: what the other leaders say.
        others: how many they are.
        results: from the last stage, None where this rank is in it.
        base, named: as of `TorchRank`.
    """

    def __init__(
        self, *base: Any, offers: OfferReceiver, others: int, results: ResultReceiver | None, **named: Any
    ) -> None:
        super().__init__(*base, **named)
        self._offers, self._others, self._results = offers, others, results

    def run(self, link: RankLink, stopping: Callable[[], bool]) -> None:
        """As `TorchRank.run`, for all leaders."""
        orders, scheduler = self._orders, self._scheduler
        assert orders is not None
        inbox = _Inbox(self._offers.next, link)
        self._send(link, report=True)
        more = False
        while not stopping():
            for envelope, body in link.receive(0.0 if more or not inbox.empty else None):
                self._take(link, envelope, body)
            self._send(link)
            step = None if self._paused else scheduler.plan()
            wanted = more or step is not None
            while not inbox.empty:
                inbox.take()
                wanted = True
            if wanted:
                link.enter("waiting")
                orders.ask()
                plans: list[Plan | None] = [None if step is None else step.plan, *self._answers(inbox)]
                more = any(plan is not None for plan in plans)
                if more:
                    orders.joint(plans)
                    self._compute(link, plans, step, self._results)
            self._send(link, report=True)
        scheduler.close_all("the rank was stopped", 503)
        self._send(link)
        orders.stop()

    def _answers(self, inbox: _Inbox[tuple[int, bool, Plan | None]]) -> list[Plan | None]:
        """What the other leaders would compute, in their order; that they want a step needs no remembering now."""
        found: dict[int, Plan | None] = {}
        while len(found) < self._others:
            dp, answer, plan = inbox.take()
            if answer:
                found[dp] = plan
        return [found[dp] for dp in sorted(found)]


class OtherLeader(TorchRank):
    """The leader of another data-parallel rank.

    Args:
        heard: orders of the first leader.
        offers: to it.
        results: from the last stage, None where this rank is in it.
        base, named: as of `TorchRank`.
    """

    def __init__(
        self, *base: Any, heard: OrderReceiver, offers: OfferSender, results: ResultReceiver | None, **named: Any
    ) -> None:
        super().__init__(*base, **named)
        self._heard, self._offers, self._results = heard, offers, results

    def run(self, link: RankLink, stopping: Callable[[], bool]) -> None:
        """As `TorchRank.run`, but that it ends when the first leader says so."""
        inbox = _Inbox(self._heard.next, link)
        self._send(link, report=True)
        step: Any = None
        while True:
            # Whoever has something to compute depends on the first leader's next word.
            link.resting = "idle" if self._paused else "waiting"
            messages = link.receive(None if inbox.empty else 0.0)
            for envelope, body in messages:
                self._take(link, envelope, body)
            self._send(link)
            if messages:
                self._offers.want()
            if inbox.empty:
                continue
            kind, plans = inbox.take()
            if kind == ASK:
                step = None if self._paused else self._scheduler.plan()
                self._offers.answer(None if step is None else step.plan)
            elif kind == JOINT:
                self._compute(link, plans, step, self._results)
                self._send(link, report=True)
            elif kind == STOP:
                break
            # Control messages come to every leader by itself.
        self._scheduler.close_all("the rank was stopped", 503)
        self._send(link)
        self._offers.close()
