"""A rank on another node, as node 0's main supervises it: like a child, by way of that node's main."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from servekit.runtime.launcher import Process
from servekit.runtime.nodes.link import Order, Stacks


class RemoteRank(Process):
    """A rank on another node; attributes as of a `Process`.

    Args:
        role, index, title, rank: which rank it is; `rank` is its place in the table.
        node: where it is.
        send: sends something to that node's main.
    """

    def __init__(
        self, role: str, index: int, title: str, rank: int, node: int, send: Callable[[Order | Stacks], None]
    ) -> None:
        super().__init__(role, index, f"{title} on node {node}", rank)
        self.node, self._send = node, send

    def command(self, command: str, **fields: Any) -> bool:
        """Send a command; whether it still runs, as far as is known."""
        if self.status is None:
            self._send(Order(self.rank, {"command": command, **fields}))
        return self.status is None

    def reap(self) -> int | None:
        """Its exit status, if its node has told of its end or has gone."""
        return self.status

    def kill(self) -> None:
        """Have its node kill it."""
        if self.status is None:
            self._send(Order(self.rank))

    def write_stacks(self) -> None:
        """Have it write what its threads are doing, to its own log."""
        if self.status is None:
            self._send(Stacks(self.rank))

    def wait(self, timeout: float) -> int | None:
        """Its status as it is known: its node's word comes when main listens, not here."""
        return self.status

    def close(self) -> None:
        """Nothing is held here."""
