"""Node 0's side of several nodes: who may take part, who is there, and what the others' ranks are seen to do."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from servekit.config import ModelInfo, ServerArgs
from servekit.runtime.launcher import FOLLOWER, SCHEDULER
from servekit.runtime.nodes.addresses import Address, listen_at
from servekit.runtime.nodes.link import (
    BEAT_S,
    CUT_BEATS,
    SILENCE_S,
    Ask,
    Died,
    End,
    FromHead,
    FromNode,
    Go,
    HeadBeat,
    HeadLink,
    Leaves,
    NodeBeat,
    Numbers,
    Refused,
    Said,
    Silence,
    Wait,
)
from servekit.runtime.nodes.meeting import DATA, MEETING, Place
from servekit.runtime.nodes.remote import RemoteRank
from servekit.runtime.nodes.secret import make_keys
from servekit.runtime.nodes.shape import Shape, difference, shape_of
from servekit.runtime.nodes.side import Side, wait_a_beat
from servekit.runtime.ranks import Rank, Sizes, number_of, title_of
from servekit.runtime.shutdown import DIED, OK
from servekit.runtime.startup import StartError
from servekit.runtime.watch import Ended, Event, Message, Stopped

if TYPE_CHECKING:
    from servekit.runtime.supervisor import Server

logger = logging.getLogger("servekit.runtime")

FORGET_S = 3.0
"""How long a node may be silent before the start until another life of it is taken in its place."""


class Node:
    """What node 0 knows of another node.

    Attributes:
        number: which one it is.
        ranks: its ranks.
        life: of its main; None while it is not there.
        addresses: of its sockets.
        refused: why it was refused last.
        gone: why it is no longer there, None while it is.
        cut: beats in a row that found no connection to it.
    """

    def __init__(self, number: int, ranks: list[RemoteRank]) -> None:
        self.number, self.ranks = number, ranks
        self.life: bytes | None = None
        self.addresses: dict[str, Address] = {}
        self.refused: str | None = None
        self.gone: str | None = None
        self.silence, self.numbers, self.leaving, self.cut = Silence(), Numbers(), False, 0


class Head(Side):
    """The nodes as node 0 sees them.

    Attributes:
        ranks: those of the other nodes.
        addresses: of all nodes' sockets, once `meet` has returned.
        interface: over which this node reaches the others.
        keys: of the sockets between the nodes.
        status: with which the other nodes end when this one does.
    """

    _link: HeadLink

    def __init__(self, args: ServerArgs, sizes: Sizes, ranks: list[Rank], place: Place) -> None:
        """Listen for the others.

        Raises:
            ConfigError: the address can't be listened on.
        """
        self._args, self._place, self.interface = args, place, place.interface
        self._run = os.urandom(16)
        self.keys = make_keys(place.secret, DATA, self._run)
        listener = listen_at(place.head, "--dist-init-addr")
        self._link = HeadLink(listener.detach(), make_keys(place.secret, MEETING), self._run)
        self._nodes = {n: Node(n, self._ranks_of(n, sizes, ranks)) for n in range(1, sizes.nodes)}
        self.ranks = [rank for node in self._nodes.values() for rank in node.ranks]
        self.addresses = dict(place.listeners.addresses)
        self.status = 0
        self._shape: Shape | None = None
        self._server: Server | None = None
        self._going, self._warned = False, False

    def _ranks_of(self, node: int, sizes: Sizes, ranks: list[Rank]) -> list[RemoteRank]:
        def send(message: FromHead) -> None:
            life = self._nodes[node].life
            if life is not None:
                self._link.send(life, message)

        found = []
        for place, rank in enumerate(ranks):
            if rank.node == node:
                role = SCHEDULER if rank.leader else FOLLOWER
                found.append(RemoteRank(role, number_of(ranks, place), title_of(rank, sizes), place, node, send))
        return found

    def meet(self, server: Server, model: ModelInfo) -> None:
        """Wait for all other nodes, then have them begin.

        Raises:
            StartError: one did not come in time, or failed.
            Stopped: a signal came first.
        """
        self.expect(server, shape_of(self._args, model))
        deadline = time.monotonic() + self._args.dist_timeout
        logger.info("waiting at %s for %s", self._place.head, _nodes(self._nodes))
        while not self.is_complete:
            if time.monotonic() >= deadline:
                raise StartError(self.who_is_missing())
            wait_a_beat(server)
        self.begin()

    def expect(self, server: Server, shape: Shape) -> None:
        """Take nodes of this shape from now on; what happens to their ranks is shown on the server's state page."""
        self._server, self._shape = server, shape

    @property
    def is_complete(self) -> bool:
        """Whether all nodes are there."""
        return all(node.life is not None for node in self._nodes.values())

    def begin(self) -> None:
        """Have all nodes begin, for they are there. From now on, one that goes does not come back."""
        for node in self._nodes.values():
            self.addresses.update(node.addresses)
        self._going = True
        now = time.monotonic()
        for node in self._nodes.values():
            node.silence.heard()
            for rank in node.ranks:
                rank.started = rank.last_news = now
            self._send(node, Go(self.addresses))

    def who_is_missing(self) -> str:
        """Which nodes did not come in time, in one line, and what may be the reason."""
        missing = [node for node in self._nodes.values() if node.life is None]
        line = f"{_nodes(node.number for node in missing)} of --nnodes {self._args.nnodes} did not come to"
        line += f" {self._place.head} within {self._args.dist_timeout:g} s (--dist-timeout)"
        if self._place.head.is_loopback and self._place.is_name:
            line += f"; {self._args.dist_init_addr} means an address here that only this machine reaches"
        elif refused := next((node for node in missing if node.refused), None):
            line += f"; node {refused.number} was refused: {refused.refused}"
        elif self._link.strangers():
            line += "; somebody came without the cluster's secret"
        return line

    def work(self) -> list[Event]:
        """Take what the nodes have said, beat, and see who is gone; never waits.

        Returns:
            What happened to their ranks.
        """
        events: list[Event] = []
        for life, number, message in self._link.take():
            events += self._hear(life, number, message)
        if self.due_s == 0:
            self._next_beat = time.monotonic() + BEAT_S
            events += self._look()
        return events

    def _look(self) -> list[Event]:
        events: list[Event] = []
        for node in self._nodes.values():
            if node.life is None or node.gone is not None:
                continue
            silent = node.silence.look()
            if not self._going and silent > FORGET_S:
                logger.warning("node %d came and is silent again", node.number)
                node.life = None
            elif silent > SILENCE_S:
                events += self._part(node, f"was not heard of for {SILENCE_S:g} s")
            elif self._going:
                node.cut = 0 if self._send(node, HeadBeat()) else node.cut + 1
                if node.cut >= CUT_BEATS:
                    events += self._part(node, "is not connected any more")
        if not self._going and self._link.strangers() and not self._warned:
            self._warned = True
            logger.warning("connections to %s come without the cluster's secret", self._place.head)
        return events

    def _hear(self, life: bytes, number: int, message: FromNode) -> list[Event]:
        if isinstance(message, Ask):
            self._answer(life, message)
            return []
        node = next((node for node in self._nodes.values() if node.life == life), None)
        if node is None or node.gone is not None:
            # Of an earlier life, or of a node that was away for too long: this run goes on without it.
            self._link.send(life, End(1, f"node 0 goes on without this node, which {node.gone if node else 'left'}"))
            return []
        node.silence.heard()
        if not node.numbers.complete(number, message):
            return self._part(node, "lost messages with its connection")
        match message:
            case Leaves(reason):
                return self._part(node, f"ended: {reason}", reason)
            case NodeBeat():
                self._show(node, message)
            case Said(place, body) if rank := _find(node, place):
                rank.last_news = time.monotonic()
                return [Message(rank, body)]
            case Died(place, status) if (rank := _find(node, place)) and rank.status is None:
                rank.status = status
                return [Ended(rank)]
        return []

    def _show(self, node: Node, beat: NodeBeat) -> None:
        if beat.leaving and not node.leaving:
            logger.warning(
                "node %d was told to stop; it works on until this one has drained, or its time is up", node.number
            )
        node.leaving = beat.leaving
        if self._server is not None:
            for pulse in beat.pulses:
                self._server.state_page.relay_rank(*(getattr(pulse, field) for field in pulse.__struct_fields__))

    def _answer(self, life: bytes, ask: Ask) -> None:
        node = self._nodes.get(ask.node)
        if node is None:
            self._refuse(life, None, f"--nnodes {self._args.nnodes} has no node {ask.node} beside node 0")
        elif self._shape is None:
            self._link.send(life, Wait())
        elif node.life is not None and node.life != life:
            if self._going:
                self._refuse(
                    life, node, f"node {ask.node} has taken part in this run before: all nodes must start anew"
                )
            else:
                # Two of them, or one that died a moment ago: who is heard of is it.
                self._link.send(life, Wait())
        elif node.gone is not None:
            self._refuse(life, node, f"this run goes on without node {ask.node}, which {node.gone}")
        elif (reason := difference(self._shape, ask.shape, ask.node)) is not None:
            self._refuse(life, node, reason)
        else:
            if node.life is None:
                logger.info("node %d is there", node.number)
                node.life, node.addresses, node.numbers = life, ask.addresses, Numbers()
                for rank in node.ranks:
                    rank.pid = ask.pids.get(rank.rank, 0)
            node.silence.heard()
            self._link.send(life, Go(self.addresses) if self._going else Wait())

    def _refuse(self, life: bytes, node: Node | None, reason: str) -> None:
        self._link.send(life, Refused(reason))
        if node is None or node.refused != reason:
            logger.warning("a node was refused: %s", reason)
        if node is not None:
            node.refused = reason

    def _part(self, node: Node, why: str, failure: str | None = None) -> list[Event]:
        """Go on without a node; what its ranks' ends mean is for main to say."""
        self._send(node, End(1, f"node 0 goes on without this node, which {why}"))
        node.gone = why
        events: list[Event] = []
        for rank in node.ranks:
            if rank.status is None:
                rank.status, rank.fate = -signal.SIGKILL, f"went with node {node.number}, which {why}"
                rank.failure = rank.failure or failure or f"node {node.number} {why}"
                events.append(Ended(rank))
        if not events:
            logger.warning("node %d %s", node.number, why)
        return events

    def _send(self, node: Node, message: FromHead) -> bool:
        return node.life is not None and self._link.send(node.life, message)

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the other nodes and let go of the line, as the end of a `with` statement. Twice is harmless."""
        if error is None or isinstance(error, Stopped):
            # Ctrl-C at node 0 is no fault of anybody.
            died = self.status == DIED
            end = End(DIED if died else OK, f"node 0 ended {'because a process died' if died else 'in order'}")
        else:
            end = End(1, str(error))
        for node in self._nodes.values():
            if node.gone is None:
                self._send(node, end)
            node.life = None
        self._link.close()


def _find(node: Node, place: int) -> RemoteRank | None:
    return next((rank for rank in node.ranks if rank.rank == place), None)


def _nodes(numbers: Iterable[int]) -> str:
    """`node 1`, or `nodes 1 and 2`."""
    *others, last = map(str, numbers)
    return f"nodes {', '.join(others)} and {last}" if others else f"node {last}"
