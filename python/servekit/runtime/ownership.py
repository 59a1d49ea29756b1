"""Who owns a file that must not outlive its process, told so that no later process can be taken for the owner.

A record names the owner by process id and start time; an flock, which the kernel drops at any death, covers what a
record can't: an owner in another pid namespace.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """A process for all times: `start` is its start in clock ticks since boot, 0 where the system does not tell."""

    pid: int
    start: int


def process_start(pid: int) -> int | None:
    """Start of a living process in clock ticks since boot; None if there is none, 0 where the system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        return 0 if _answers(pid) else None
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses itself; state is the first field after it.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def myself() -> Owner:
    """The calling process as an owner."""
    return Owner(os.getpid(), process_start(os.getpid()) or 0)


def lock(fd: int) -> None:
    """Hold an open file as its owner, until the descriptor is closed or the process dies."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_stale(fd: int, owner: Owner) -> bool:
    """Whether the owner of an open file is dead: no such process with that start, and nobody holds the lock."""
    start = process_start(owner.pid)
    if start is not None and (owner.start in (0, start)):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
