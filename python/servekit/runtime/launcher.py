"""Main's side of a child: start it, hear it, see it die, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from servekit.config.secrets import ENVIRONMENT as SECRET_ENVIRONMENT
from servekit.runtime.channel import Channel
from servekit.runtime.child import CONTROL, FOLLOWER, HTTP, SCHEDULER, STACKS_SIGNAL, Boot
from servekit.runtime.progress import Stood

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SCHEDULER_ENV = {
    # glibc gives large temporaries back to the kernel at once and faults them in again at every step; kept, gathering
    # pages and attention took a quarter of the time.
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "67108864",
    # OpenMP's threads wait for each other after every operation, by default turning for long. Where another process
    # wants a core, that keeps the awaited thread from running: beside one busy core, two cores decoded 29 tokens/s in
    # 16 streams, and 108 with this. On an idle machine it costs: 125 tokens/s instead of 181, one stream 17 instead
    # of 27. A server has neighbours, its own workers first; who has the machine to themselves sets 300000.
    "GOMP_SPINCOUNT": "1000",
}


def _environment(role: str) -> dict[str, str]:
    """What a child inherits: no secrets, which go to HTTP workers by their line to main."""
    inherited = {name: value for name, value in os.environ.items() if name not in SECRET_ENVIRONMENT}
    return {**SCHEDULER_ENV, **inherited} if role in (SCHEDULER, FOLLOWER) else inherited


class DeathPipe:
    """A pipe whose write end only main holds: its end of file tells the children that main is gone."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def close(self) -> None:
        """End every child that still listens to it."""
        os.close(self.read_end)
        os.close(self._write_end)


class Process(ABC):
    """A process that main supervises.

    Attributes:
        role, index, title: which one it is.
        pid: its process id on its machine, 0 while that is not known.
        started: when it was started, in seconds of the monotonic clock.
        ready_after: seconds from start to ready, None before that.
        info: what it told when it was ready.
        announced: control was told of this rank.
        failure: the line with which it gave up its start.
        stood: how far it had come with its start.
        last_news: when it was last heard of, in seconds of the monotonic clock.
        status: exit status, negative for a signal; None while it runs.
        rank: its place in the table of ranks, -1 if it is none.
        fate: how it ended, in words, where its status does not tell.
    """

    def __init__(self, role: str, index: int, title: str, rank: int) -> None:
        self.role, self.index, self.title, self.rank = role, index, title, rank
        self.pid = 0
        self.started = self.last_news = time.monotonic()
        self.ready_after: float | None = None
        self.info: dict[str, Any] = {}
        self.announced = False
        self.failure: str | None = None
        self.stood = Stood()
        self.status: int | None = None
        self.fate: str | None = None

    @abstractmethod
    def command(self, command: str, **fields: Any) -> bool:
        """Send a command; False if the process can't hear it any more."""

    @abstractmethod
    def reap(self) -> int | None:
        """Exit status if it has ended, negative for a signal, else None."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL, if it still runs."""

    @abstractmethod
    def write_stacks(self) -> None:
        """Have it write what its threads are doing, if it still runs and can."""

    @abstractmethod
    def wait(self, timeout: float) -> int | None:
        """Wait at most that many seconds for its end; its status, or None if it still runs."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held of it, once it has ended."""

    def how_it_ended(self) -> str:
        """Status or signal in words, such as `was killed by SIGKILL`."""
        if self.fate is not None:
            return self.fate
        if self.status is None:
            return "still runs"
        if self.status < 0:
            try:
                return f"was killed by {signal.Signals(-self.status).name}"
            except ValueError:
                return f"was killed by signal {-self.status}"
        return f"ended with status {self.status}"


class Child(Process):
    """A running child.

    Attributes:
        epoch: which life of its role and index it is.
        pidfd: descriptor that is readable when it has ended, -1 where the system has none.
        channel: the line to it.
    """

    def __init__(
        self,
        role: str,
        index: int,
        boot: Boot,
        listener: socket.socket | None = None,
        sockets: Mapping[str, socket.socket] = {},
    ) -> None:
        """Start it from the main thread: the parent-death signal is tied to the thread that forks.

        Args:
            role, index: which child.
            boot: what it is told, without the descriptors of its sockets.
            listener: an HTTP worker's socket; the caller closes its copy.
            sockets: see `Boot.sockets`; likewise.
        """
        super().__init__(role, index, boot.title, boot.rank)
        self.epoch = boot.epoch
        ours, theirs = socket.socketpair()
        boot = msgspec.structs.replace(
            boot,
            channel=theirs.fileno(),
            listener=-1 if listener is None else listener.fileno(),
            sockets={name: each.fileno() for name, each in sockets.items()},
        )
        kept = (boot.channel, boot.death_pipe, boot.listener, *boot.sockets.values())
        passed = [fd for fd in kept if fd >= 0]
        arguments = [role, str(index), msgspec.json.encode(boot).decode()]
        # Blocked signals stay blocked across exec, so none can end a child before it ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "servekit.runtime.child", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                env=_environment(role),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.pid = self._process.pid
        # Where there are no pidfds, the end of the channel tells the same, only not of a process that hangs in exit.
        self.pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1
        self.channel = Channel(ours)

    def command(self, command: str, **fields: Any) -> bool:
        """Send a command; False if the child can't hear it any more."""
        return not self.channel.closed and self.channel.send({"command": command, **fields})

    def reap(self) -> int | None:
        """Exit status if it has ended, negative for a signal, else None."""
        if self.status is None:
            self.status = self._process.poll()
        return self.status

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self.reap() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def write_stacks(self) -> None:
        """Have it write what its threads are doing, if it still runs and can."""
        if self.reap() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(STACKS_SIGNAL)

    def wait(self, timeout: float) -> int | None:
        """Wait at most that many seconds for its end; its status, or None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self.reap()

    def close(self) -> None:
        """Let go of the descriptors, once it has ended."""
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


__all__ = ["CONTROL", "FOLLOWER", "HTTP", "SCHEDULER", "Child", "DeathPipe", "Process"]
