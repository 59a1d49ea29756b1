"""What main waits for: signals, its children's words, and their deaths, all at once and without a timer of its own."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeAlias

from servekit.runtime.channel import ChannelError
from servekit.runtime.launcher import Child, Process


class Message(NamedTuple):
    """A child, or a rank on another node, said something."""

    child: Process
    body: dict[str, Any]


class Ended(NamedTuple):
    """A child, or a rank on another node, is no more; `child.status` says how."""

    child: Process


class Signal(NamedTuple):
    """Main was told to end: SIGINT, SIGTERM or SIGHUP."""

    number: int


Event: TypeAlias = Message | Ended | Signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Line(Protocol):
    """Something else that main listens to wherever it waits: the line to other nodes."""

    def fileno(self) -> int:
        """Descriptor that is readable when there may be something to do."""
        ...

    @property
    def due_s(self) -> float:
        """Seconds until `work` should be called at the latest."""
        ...

    def work(self) -> list[Event]:
        """Do what there is to do, without waiting; what happened to ranks."""
        ...


class Stopped(BaseException):
    """A signal while main was busy with work of its own, such as fetching a model."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    """Set what runs on a signal; beside it, the wake-up descriptor always tells."""
    for number in SIGNALS:
        signal.signal(number, handler)


class Watch:
    """The one place where main blocks. Use from the main thread, one at a time."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        _handle(lambda number, frame: None)
        self._selector.register(self._reader, selectors.EVENT_READ, None)
        self._line: Line | None = None

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Work that may take long, between steps that must not be torn apart: a signal ends it with `Stopped`."""

        def stop(number: int, frame: FrameType | None) -> None:
            raise Stopped(number)

        try:
            _handle(stop)
            for event in self.wait(0):
                if isinstance(event, Signal):
                    raise Stopped(event.number)
            yield
        finally:
            _handle(lambda number, frame: None)

    def add(self, child: Child) -> None:
        """Watch a child from now on, until it has ended."""
        self._selector.register(child.channel, selectors.EVENT_READ, child)
        if child.pidfd >= 0:
            self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def attach(self, line: Line) -> None:
        """Listen to the other nodes too, from now on."""
        self._line = line
        self._selector.register(line, selectors.EVENT_READ, line)

    def wait(self, timeout: float | None) -> list[Event]:
        """Events in the order in which they are to be handled; a child's last words come before its end.

        Args:
            timeout: seconds, None for ever; [] when they have passed, or the other nodes said something else.
        """
        events: list[Event] = [] if self._line is None else self._line.work()
        if self._line is not None:
            due = 0.0 if events else self._line.due_s
            timeout = due if timeout is None else min(timeout, due)
        ready = {key.data for key, _ in self._selector.select(timeout)}
        if None in ready:
            events += self._signals()
        if self._line is not None:
            events += self._line.work()
        for child in ready - {None, self._line}:
            events += self._hear(child)
        return events

    def _signals(self) -> list[Event]:
        with contextlib.suppress(BlockingIOError):
            return [Signal(number) for number in self._reader.recv(64) if number in SIGNALS]
        return []

    def _hear(self, child: Child) -> list[Event]:
        try:
            events: list[Event] = [Message(child, body) for body in child.channel.receive()]
        except ChannelError as error:
            events = [Message(child, {"event": "failed", "message": f"{child.title}: {error}"})]
            child.kill()
        if events:
            child.last_news = time.monotonic()
        if child.reap() is None and child.channel.closed:
            # It hung up: it is ending, or it closed what it must not close. Either way it is over.
            child.wait(1.0)
            child.kill()
            child.wait(1.0)
        if child.reap() is not None:
            self._remove(child)
            events.append(Ended(child))
        return events

    def _remove(self, child: Child) -> None:
        for each in (child.channel, child.pidfd):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(each)

    def close(self) -> None:
        """Stop watching."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._reader.close()
        self._writer.close()
