"""How a server ends, or a part of it: after a drain, at once, or by a death. Every stream in reach gets its end."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from servekit.runtime.launcher import HTTP, SCHEDULER, Process
from servekit.runtime.notify import tell_stopping
from servekit.runtime.phase import Phase
from servekit.runtime.watch import Ended, Signal

if TYPE_CHECKING:
    from servekit.runtime.supervisor import Server

logger = logging.getLogger("servekit.runtime")

OK, DIED = 0, 1

FAIL_S = 1.2
"""How long the streams may take to send their error events."""
STOP_S = 1.0
"""How long the children may take to end after `stop`; with `FAIL_S` it makes the 3 s that a shutdown may last."""
LOOK_EVERY_S = 0.02
"""How often the open requests are counted while they run out."""
REPEAT_S = 0.25
"""How often the order to fail is repeated, for requests that were on their way when it came."""


def drain(server: Server) -> int:
    """Let running requests finish, up to the drain timeout; take no new ones.

    Returns:
        Exit status: 0, also when the time was up; 130 after Ctrl-C meanwhile; 1 when a child died meanwhile.
    """
    server.state_page.phase = Phase.DRAINING
    tell_stopping()
    timeout = server.args.drain_timeout
    logger.info("draining: %d open requests get up to %g s", server.open_requests(), timeout)
    deadline = time.monotonic() + timeout
    while server.open_requests() and time.monotonic() < deadline:
        for event in server.watch.wait(LOOK_EVERY_S):
            if isinstance(event, Signal):
                at_once(server, "the server was told twice to stop")
                return 130 if event.number == signal.SIGINT else OK
            if isinstance(event, Ended) and not goes_on(server, event.child):
                return after_death(server, event.child)
    at_once(server, f"the server shuts down and its drain timeout of {timeout:g} s has passed")
    return OK


def at_once(server: Server, reason: str) -> None:
    """End every stream with an error event, then every child, within 3 s."""
    server.state_page.phase = Phase.STOPPING
    _fail_streams(server, reason)
    end_children(server, STOP_S)


def goes_on(server: Server, dead: Process) -> bool:
    """Part with the replica of a rank that died, if there are others.

    All ranks of its group are killed, for they can't even end without the dead one; control takes them out of the
    dispatch and ends their requests with an error event.

    Returns:
        False if the server can't go on: no other replica is left, or the dead child was none of the ranks.
    """
    if dead.rank < 0:
        return False
    if server.is_lost(dead):
        # It was killed with its group.
        return True
    server.lost.add(server.ranks[dead.rank].replica)
    left = server.sizes.replicas - len(server.lost)
    if not left or server.control is None:
        return False
    logger.error(
        "%s (pid %d) %s; its replica ends, %d of %d go on",
        dead.title,
        dead.pid,
        dead.how_it_ended(),
        left,
        server.sizes.replicas,
    )
    _end_group(server, dead)
    return True


def _end_group(server: Server, dead: Process) -> None:
    control = server.control
    for child in server.group_of(dead):
        child.kill()
    for dp in sorted({rank.dp for rank in server.ranks if rank.replica == server.ranks[dead.rank].replica}):
        server.state_page.end_process(SCHEDULER, dp)
        if control is not None:
            control.command("rank_down", rank=dp, reason=f"{dead.title} {dead.how_it_ended()}")


def after_death(server: Server, dead: Process) -> int:
    """Log a child's death, end the streams with an error event, end the rest.

    Returns:
        Exit status 1.
    """
    logger.error("%s (pid %d) %s; the server ends", dead.title, dead.pid, dead.how_it_ended())
    if dead.rank >= 0:
        _end_group(server, dead)
    else:
        server.state_page.end_process(dead.role, dead.index)
    at_once(server, f"{dead.title} died and the server ends")
    return DIED


def _fail_streams(server: Server, reason: str) -> None:
    """Order error events and wait until they are out. Control's shards send them; without it, the workers do."""
    deadline = time.monotonic() + FAIL_S
    repeat_at = 0.0
    while server.open_requests() and (now := time.monotonic()) < deadline:
        if now >= repeat_at:
            repeat_at = now + REPEAT_S
            _order_failure(server, reason)
        for event in server.watch.wait(LOOK_EVERY_S):
            if isinstance(event, Ended) and not server.is_lost(event.child):
                logger.error("%s (pid %d) %s", event.child.title, event.child.pid, event.child.how_it_ended())
                repeat_at = 0.0
            elif isinstance(event, Signal):
                return


def _order_failure(server: Server, reason: str) -> None:
    control = server.control
    if control is not None and control.command("fail_all", message=reason):
        return
    for worker in server.of(HTTP):
        worker.command("fail_streams", message=reason)


def end_children(server: Server, grace_s: float) -> None:
    """Tell every living child to stop, then kill those that still run.

    Args:
        server: whose children.
        grace_s: seconds between the word and the kill; 0 kills at once.
    """

    def living() -> list[Process]:
        return [child for child in server.children if child.reap() is None]

    if grace_s > 0:
        for child in living():
            child.command("stop")
        _wait_until(lambda: not living(), server, grace_s)
    for child in living():
        if grace_s > 0:
            logger.warning("%s (pid %d) did not stop within %g s and is killed", child.title, child.pid, grace_s)
        child.kill()
    for child in living():
        # SIGKILL can't be refused; only the kernel itself may take its time.
        child.wait(5.0)


def _wait_until(done: Callable[[], bool], server: Server, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and (left := deadline - time.monotonic()) > 0:
        if any(isinstance(event, Signal) for event in server.watch.wait(left)):
            return
