"""Which sockets of a server lie between which processes, and so which of them must be reached from other nodes."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from servekit.config.port_args import EGRESS, offers_ipc, orders_ipc, rank_ipc, results_ipc, store_name
from servekit.runtime.nodes.addresses import LOOPBACK, Address, address_of, listen_within
from servekit.runtime.ranks import Rank, Sizes

CONTROL = -1
"""In place of a rank: the control process, which is on node 0."""


class Line(NamedTuple):
    """A named socket.

    Attributes:
        name: of the socket, as in `PortArgs`.
        binder: place in the table of ranks of the one who listens, or `CONTROL`.
        node: where that one is.
        connecting: nodes of those who connect.
        is_store: torch's own, which knows nothing but TCP.
    """

    name: str
    binder: int
    node: int
    connecting: frozenset[int]
    is_store: bool = False

    @property
    def crosses(self) -> bool:
        """Whether somebody connects from another node."""
        return not self.connecting <= {self.node}


def make_lines(sizes: Sizes, ranks: Sequence[Rank]) -> list[Line]:
    """All sockets on which ranks are spoken to, or speak.

    Args:
        sizes: of the groups.
        ranks: the table of ranks.
    """
    leaders = [rank for rank in ranks if rank.leader]
    found = [Line(EGRESS, CONTROL, 0, frozenset(rank.node for rank in leaders))]
    found += [Line(rank_ipc(rank.dp), CONTROL, 0, frozenset((rank.node,))) for rank in leaders]
    if sizes.world == 1:
        return found
    last = sizes.pipeline - 1
    for place, rank in enumerate(ranks):
        members = [each for each in ranks if each.replica == rank.replica]
        first = members[0]
        if rank.world > 0:
            found.append(Line(orders_ipc(rank.replica, rank.world), place, rank.node, frozenset((first.node,))))
        else:
            others = frozenset(each.node for each in members[1:] if each.leader)
            everybody = frozenset(each.node for each in members)
            found.append(Line(store_name(rank.replica), place, rank.node, everybody, is_store=True))
            if others:
                found.append(Line(offers_ipc(rank.replica), place, rank.node, others))
        if rank.leader and last:
            tellers = frozenset(each.node for each in members if each.pp == last and each.dp == rank.dp)
            found.append(Line(results_ipc(rank.dp), place, rank.node, tellers))
    return found


def reached_by_tcp(lines: Iterable[Line], node: int, addresses: Mapping[str, Address]) -> dict[str, str]:
    """Where the processes of a node find sockets that are not in their run directory, by name.

    Args:
        lines: of all nodes.
        node: whose processes.
        addresses: of the TCP sockets of all nodes.
    """
    return {
        line.name: str(addresses[line.name])
        for line in lines
        if line.name in addresses and (line.is_store or line.node != node)
    }


class Listeners:
    """The TCP sockets of one node, bound before anybody is told of them.

    Attributes:
        addresses: where each is, by its name.
    """

    def __init__(self, lines: Iterable[Line], node: int, ip: str, ports: range | None = None) -> None:
        """Bind those to which others connect from other nodes, and stores.

        Args:
            lines: of all nodes.
            node: whose sockets.
            ip: its address; what only this node uses is bound to loopback.
            ports: to choose from; None is any free one.

        Raises:
            ConfigError: they can't be bound.
        """
        self._lines = {line.name: line for line in lines if line.node == node and (line.crosses or line.is_store)}
        self._sockets: dict[str, socket.socket] = {}
        try:
            for name, line in self._lines.items():
                self._sockets[name] = listen_within(ip, ports) if line.crosses else listen_within(LOOPBACK, None)
        except BaseException:
            self.close()
            raise
        self.addresses: Mapping[str, Address] = {name: address_of(sock) for name, sock in self._sockets.items()}

    def of(self, binder: int) -> dict[str, socket.socket]:
        """The sockets of one process, by name."""
        return {name: self._sockets[name] for name, line in self._lines.items() if line.binder == binder}

    def close(self) -> None:
        """Let go of main's copies; twice is harmless."""
        for sock in self._sockets.values():
            sock.close()
