"""How long a connection may take: bounds on slow senders and slow readers, and on how many connections there are.

A connection only notes times; one sweep a second over all of them does the rest, so no request pays for a timer.
"""

from __future__ import annotations

import asyncio
import math
import resource
from collections.abc import Callable, Iterable
from typing import ClassVar

from servekit.http.errors import raw_error
from servekit.http.refusing import RefusingProtocol
from servekit.tokenizer.refusal import Refusal

FIRST_BYTE_S = 65.0
"""Seconds that a new connection may say nothing."""
HEAD_S = 30.0
"""Seconds from the first byte of a request to the end of its headers."""
BODY_S = 30.0
"""Seconds that the sender of a body may be behind `BODY_RATE`."""
BODY_RATE = 1024.0
"""Least bytes a second of a body."""
READ_S = 60.0
"""Seconds in which a client that has not read what waits for it must have read something."""
LINGER_S = 5.0
"""Seconds that the answer to a slow sender has to leave."""

SWEEP_S = 1.0
_KEPT_DESCRIPTORS = 128
"""Descriptors that a worker needs for other things than connections."""


def connection_limit() -> int:
    """Most connections of one worker, by the descriptors that it may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(16, soft - _KEPT_DESCRIPTORS)


class PatientProtocol(RefusingProtocol):
    """uvicorn's protocol, which knows until when its client must have done what it is about to do.

    Attributes:
        due: when the client must have sent its head, or some of its body, by the loop's clock; infinite while it need
            not send anything.
        crowded: connections of this process that were refused, for there were too many.
    """

    crowded: ClassVar[int] = 0
    due = math.inf
    _stuck_bytes = 0
    _stuck_since = math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, unless there are too many."""
        super().connection_made(transport)
        self.due = self.loop.time() + FIRST_BYTE_S
        limit = self.limit_concurrency
        if limit is not None and len(self.connections) >= limit:
            PatientProtocol.crowded += 1
            self.due = self.loop.time() + LINGER_S
            transport.write(raw_error(Refusal(503, "this server has too many connections", retry_after=1)))
            transport.close()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self.due = self.loop.time() + HEAD_S

    def on_headers_complete(self) -> None:
        """A body may begin."""
        self.due = self.loop.time() + BODY_S
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Each byte buys time, but never more than `BODY_S`."""
        self.due = min(self.due + len(body) / BODY_RATE, self.loop.time() + BODY_S)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is here."""
        self.due = math.inf
        super().on_message_complete()

    def check(self, now: float, late: float) -> str | None:
        """End the connection if its client is too slow.

        Args:
            now: by the loop's clock.
            late: seconds that this process itself was busy with something else.

        Returns:
            What to count: slow_senders or slow_readers; None if all is well.
        """
        self.due += late
        if self.last_words is not None and not self.transport.is_closing():
            # What it did not send to the end is refused already, and waits for the answers before it.
            self.due = math.inf
        if self.flow.read_paused:
            # The client could not send if it wanted to.
            self.due = max(self.due, now + BODY_S)
        if now >= self.due:
            return self._end_slow_sender(now)
        if not self.flow.write_paused:
            self._stuck_since = math.inf
            return None
        waiting = self.transport.get_write_buffer_size()
        if self._stuck_since == math.inf or waiting < self._stuck_bytes:
            self._stuck_bytes, self._stuck_since = waiting, now
        self._stuck_since += late
        if now - self._stuck_since < READ_S:
            return None
        self.transport.abort()
        return "slow_readers"

    def _end_slow_sender(self, now: float) -> str | None:
        if self.transport.is_closing():
            self.transport.abort()
            return None
        self.due = now + LINGER_S
        begun = self.scope is not None
        if not begun:
            self.transport.close()
        else:
            in_body = self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete
            what = "body" if in_body else "headers"
            self.refuse(Refusal(408, f"the request's {what} came too slowly", code="request_timeout"))
        return "slow_senders"


class Sweep:
    """Checks every connection of a server.

    Args:
        loop: the server's.
        count: told what happened, and how often: slow_senders, slow_readers or crowded.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, count: Callable[[str, int], None]) -> None:
        self._loop = loop
        self._count = count
        self._crowded = PatientProtocol.crowded
        self._last = loop.time()

    def __call__(self, connections: Iterable[object]) -> None:
        """To be called about every `SWEEP_S` seconds."""
        now = self._loop.time()
        # What came meanwhile has not been read yet: nobody is to blame for that time.
        late = max(0.0, now - self._last - SWEEP_S)
        late = late if late > SWEEP_S else 0.0
        self._last = now
        for connection in list(connections):
            if isinstance(connection, PatientProtocol) and (what := connection.check(now, late)) is not None:
                self._count(what, 1)
        if PatientProtocol.crowded != self._crowded:
            self._count("crowded", PatientProtocol.crowded - self._crowded)
            self._crowded = PatientProtocol.crowded
