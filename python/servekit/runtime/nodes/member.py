"""Another node's side: it asks node 0 to take part, does what that says, and ends when it is gone."""

from __future__ import annotations

import logging
import os
import signal
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from servekit.config import ModelInfo, ServerArgs
from servekit.config.secrets import Keys
from servekit.runtime.launcher import FOLLOWER, SCHEDULER, Process
from servekit.runtime.nodes.health import HealthEndpoint, State
from servekit.runtime.nodes.link import (
    BEAT_S,
    CUT_BEATS,
    SILENCE_S,
    Ask,
    Died,
    End,
    FromHead,
    Go,
    HeadBeat,
    Leaves,
    NodeBeat,
    NodeLink,
    Numbers,
    Order,
    Pulse,
    Refused,
    Said,
    Silence,
    Stacks,
    Wait,
)
from servekit.runtime.nodes.meeting import DATA, MEETING, Place
from servekit.runtime.nodes.secret import make_keys
from servekit.runtime.nodes.shape import Shape, shape_of
from servekit.runtime.nodes.side import Side, wait_a_beat
from servekit.runtime.notify import tell_ready
from servekit.runtime.phase import Phase
from servekit.runtime.shutdown import DIED, OK, STOP_S, end_children
from servekit.runtime.startup import StartError
from servekit.runtime.watch import Ended, Event, Message, Signal, Stopped

if TYPE_CHECKING:
    from servekit.runtime.supervisor import Server

logger = logging.getLogger("servekit.runtime")

HUNG_UP = 5
"""Handshakes in a row that node 0 broke off, until it is said that it has another secret."""
EXTRA_S = 10.0
"""How much longer than `--drain-timeout` a node that was told to stop waits for node 0 to end."""
LAST_WORDS_S = 5.0
"""How long a node that has no rank left waits for node 0 to say what that means."""
STALLED_S = 10.0
"""How long main may do something else until its node does not count as healthy."""


def _state_of(child: Process) -> str:
    if child.status is not None:
        return child.how_it_ended()
    return "starting" if child.ready_after is None else "ready"


class Member(Side):
    """Node 0 as another node sees it.

    Attributes:
        ranks: empty: of other nodes' ranks it knows nothing.
        addresses: of all nodes' sockets, once `meet` has returned.
        interface: over which this node reaches the others.
        keys: of the sockets between the nodes; likewise.
        taking_part: node 0 has said that all are there.
        end: how and why this node has to end, None while it has not.
    """

    _link: NodeLink

    def __init__(self, args: ServerArgs, place: Place) -> None:
        self._args, self._place, self.interface = args, place, place.interface
        self.ranks: list[Process] = []
        self.addresses = dict(place.listeners.addresses)
        self.keys: Keys | None = None
        self.end: tuple[int, str] | None = None
        # The first byte must not be 0: ZeroMQ keeps such names for itself.
        self._life = b"n" + os.urandom(16)
        self._run: bytes | None = None
        self._silence, self._numbers = Silence(), Numbers()
        self.taking_part = False
        self._leaving, self._cut = False, 0
        self._answered = self._looked = time.monotonic()
        self._ask: Ask | None = None
        self._server: Server | None = None
        self._health: HealthEndpoint | None = None
        if args.health_port is not None:
            self._health = HealthEndpoint(args.host, args.health_port, self.state)
            logger.info("health is told at %s port %d", args.host, self._health.port)
        self._link = NodeLink(place.head, make_keys(place.secret, MEETING), self._life)

    def meet(self, server: Server, model: ModelInfo) -> None:
        """Ask node 0 to take part, until it says that all are there.

        Raises:
            StartError: it refuses, or does not answer in time.
            Stopped: a signal came first.
        """
        self.ask(server, shape_of(self._args, model))
        logger.info("asking node 0 at %s to take part", self._place.head)
        self.wait_for_node_0(server)

    def wait_for_node_0(self, server: Server) -> None:
        """The second half of `meet`."""
        args, head = self._args, self._place.head
        while not self.taking_part:
            wait_a_beat(server)
            if self.end is not None:
                raise StartError(self.end[1])
            if time.monotonic() - self._answered > args.dist_timeout:
                raise StartError(f"node 0 at {head} did not answer within {args.dist_timeout:g} s (--dist-timeout)")
            if self._run is None and self._link.strangers() >= HUNG_UP:
                raise StartError(
                    f"node 0 at {head} hangs up: it has another secret (--cluster-secret-file), or is no node at all"
                )

    def ask(self, server: Server, shape: Shape) -> None:
        """Ask to take part, from now on and until it is answered."""
        pids = {child.rank: child.pid for child in server.children}
        self._server, self._ask = server, Ask(self._args.node_rank, shape, self.addresses, pids)
        self._answered, self._next_beat = time.monotonic(), 0.0

    def work(self) -> list[Event]:
        """Do what node 0 says, beat, and see whether it is gone; never waits."""
        self._looked = time.monotonic()
        for run, number, message in self._link.take():
            self._hear(run, number, message)
        if self.due_s == 0:
            self._next_beat = time.monotonic() + BEAT_S
            if self.taking_part:
                self._link.send(NodeBeat(self._pulses(), self._leaving))
                self._cut = 0 if self._link.connected() else self._cut + 1
                silent = self._silence.look()
                if self.end is None and self._cut >= CUT_BEATS:
                    self.end = (DIED, f"node 0 at {self._place.head} is not connected any more")
                elif self.end is None and silent > SILENCE_S:
                    self.end = (DIED, f"node 0 at {self._place.head} was not heard of for {SILENCE_S:g} s")
            elif self._ask is not None:
                self._link.send(self._ask)
        return []

    def _hear(self, run: bytes, number: int, message: FromHead) -> None:
        if run != self._run:
            if self.taking_part:
                # Another life of node 0, in which this node has no part.
                return
            self._run, self._numbers = run, Numbers()
        self._silence.heard()
        self._answered = time.monotonic()
        if not self._numbers.complete(number, message) and self.taking_part:
            self.end = (DIED, f"messages of node 0 at {self._place.head} were lost with its connection")
        match message:
            case Go(addresses) if not self.taking_part:
                self.taking_part = True
                self.addresses.update(addresses)
                self.keys = make_keys(self._place.secret, DATA, run)
            case Refused(reason):
                self.end = (DIED, f"node 0 refuses node {self._args.node_rank}: {reason}")
            case End(status, reason):
                self.end = (status, reason)
            case Order(place, body) if (child := self._child(place)) is not None:
                if body is None:
                    child.kill()
                else:
                    child.command(**body)
            case Stacks(place) if (child := self._child(place)) is not None:
                child.write_stacks()
            case Go() | Wait() | HeadBeat() | Order() | Stacks():
                pass

    def _child(self, place: int) -> Process | None:
        children = [] if self._server is None else self._server.children
        return next((child for child in children if child.rank == place), None)

    def _pulses(self) -> list[Pulse]:
        if self._server is None or not self._server.has_page:
            # Node 0 may have said go a moment ago.
            return []
        page = self._server.state_page.snapshot()
        leaders = len(page["ranks"])
        shown = [(child.index, page["ranks"][child.index]) for child in self._server.of(SCHEDULER)]
        shown += [(leaders + child.index, page["followers"][child.index]) for child in self._server.of(FOLLOWER)]
        return [
            Pulse(
                index,
                says["pulse_epoch"],
                says["pulse_age_s"],
                says["phase"],
                says["phase_age_s"],
                says["moved_age_s"],
                says["step"],
                bool(says["awaits"]),
            )
            for index, says in shown
            if says["pulse_age_s"] is not None and says["phase_age_s"] is not None
        ]

    def state(self) -> State:
        """How this node is; from any thread."""
        # A copy: main's thread goes on.
        children = [] if self._server is None else list(self._server.children)
        serving = [child for child in children if child.status is None and child.ready_after is not None]
        # Finding the model may take as long as it takes.
        works = self._server is None or time.monotonic() - self._looked < STALLED_S
        alive = works and (not children or any(child.status is None for child in children))
        details = {
            "node": self._args.node_rank,
            "node_0": str(self._place.head),
            "taking_part": self.taking_part,
            "leaving": self._leaving,
            "ranks": [{"title": each.title, "pid": each.pid, "state": _state_of(each)} for each in children],
        }
        return State(alive, works and bool(serving) and self.end is None and not self._leaving, details)

    def follow(self, server: Server) -> int:
        """Work until node 0 says that it is over; the exit status.

        Raises:
            StartError: the start has failed, here or elsewhere.
        """
        deadline: float | None = None
        while self.end is None:
            for event in server.watch.wait(BEAT_S):
                match event:
                    case Signal(number) if number == signal.SIGINT or deadline is not None or not server.is_ready:
                        raise Stopped(number)
                    case Signal():
                        self._leaving = True
                        wait = self._args.drain_timeout + EXTRA_S
                        deadline = time.monotonic() + wait
                        logger.info("told to stop: working on until node 0 has drained, for %g s at most", wait)
                    case Message(child, body):
                        self._note(server, child, body)
                        self.pass_on(child, body)
                    case Ended(child):
                        self.tell_of_end(child)
            if deadline is None and not any(child.status is None for child in server.children):
                deadline = time.monotonic() + LAST_WORDS_S
            if deadline is not None and time.monotonic() > deadline:
                why = "its drain timeout has passed" if self._leaving else "none of its ranks is left"
                self._link.send(Leaves(why))
                self.end = (OK if self._leaving else DIED, f"this node ends: {why}")
        status, reason = self.end
        failed = next((child.failure for child in server.children if child.failure), None)
        end_children(server, STOP_S)
        if status != OK and not server.is_ready:
            raise StartError(failed or reason)
        logger.log(logging.INFO if status == OK else logging.ERROR, "%s", reason)
        return status

    def _note(self, server: Server, child: Process, body: dict[str, object]) -> None:
        """See on this node too what a rank of it said."""
        if body.get("event") == "failed":
            child.failure = str(body.get("message"))
            logger.error("%s: %s", child.title, child.failure)
        elif body.get("event") == "ready":
            child.ready_after = time.monotonic() - child.started
            logger.info("%s ready in %.2f s", child.title, child.ready_after)
            if all(each.ready_after is not None for each in server.children):
                server.state_page.phase = Phase.READY
                server.state_page.mark_ready()
                tell_ready()

    def pass_on(self, child: Process, body: dict[str, Any]) -> None:
        """Tell node 0 what a rank of this node said."""
        self._link.send(Said(child.rank, body))

    def tell_of_end(self, child: Process) -> None:
        """Tell node 0 that a rank of this node has ended."""
        logger.warning("%s (pid %d) %s", child.title, child.pid, child.how_it_ended())
        self._link.send(Died(child.rank, 0 if child.status is None else child.status))

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Tell node 0 why this one ends, unless it said so, as the end of a `with` statement. Twice is harmless."""
        if self.end is None:
            told = f"node {self._args.node_rank} was told to stop"
            why = told if error is None or isinstance(error, Stopped) else f"node {self._args.node_rank}: {error}"
            self._link.send(Leaves(why))
            self.end = (OK, why)
        self._link.close()
        if self._health is not None:
            self._health.close()
