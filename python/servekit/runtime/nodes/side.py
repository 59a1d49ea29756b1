"""What both sides of the line between mains have in common: main listens to it, and waits for the others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from servekit.runtime.nodes.link import BEAT_S, LinkEnd
from servekit.runtime.startup import StartError
from servekit.runtime.watch import Ended, Signal, Stopped

if TYPE_CHECKING:
    from servekit.runtime.supervisor import Server


class Side:
    """One side. Belongs to main's thread, which calls `work` wherever it waits."""

    _link: LinkEnd
    _next_beat = 0.0

    def fileno(self) -> int:
        """Descriptor that is readable when there is something to do."""
        return self._link.fileno()

    @property
    def due_s(self) -> float:
        """Seconds until `work` should be called at the latest."""
        return max(self._next_beat - time.monotonic(), 0.0)


def wait_a_beat(server: Server) -> None:
    """Wait for the other nodes, no longer than a beat.

    Raises:
        StartError: a rank of this node ended.
        Stopped: a signal came.
    """
    for event in server.watch.wait(BEAT_S):
        if isinstance(event, Signal):
            raise Stopped(event.number)
        if isinstance(event, Ended):
            child = event.child
            raise StartError(child.failure or f"{child.title} {child.how_it_ended()} before it was ready")
