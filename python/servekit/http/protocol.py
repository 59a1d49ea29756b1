"""uvicorn's HTTP protocol with one more ASGI extension: bytes for a running response, without waking its coroutine.

A response begins and ends with ASGI's `send`, so middleware sees both. What comes between may go through
`scope["extensions"][EXTENSION]`, a `ResponseStream`, from wherever its bytes are made. Nothing else of uvicorn's state
is touched than what `send` itself relies on; `tests/contract/test_protocol.py` holds both to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "servekit.stream"


def _drop(_data: bytes) -> None:
    """Where the body of a response to HEAD goes."""


class CorkedTransport:
    """A transport that sends what is written within one turn of the loop at once.

    uvicorn writes a head and a body by themselves, and each write is a system call, a packet, and a client that wakes.
    Everything but writing and closing goes to the transport itself.

    Attributes:
        direct: writes past what waits; for whoever knows that nothing does.
    """

    __slots__ = ("_loop", "_parts", "_transport", "direct", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self.is_closing = transport.is_closing
        self.direct = transport.write

    def write(self, data: bytes) -> None:
        """Send with what else is written before `flush`."""
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)

    def flush(self, data: bytes = b"") -> None:
        """Send what waits, and `data` with it."""
        if data:
            self._parts.append(data)
        if self._parts:
            parts, self._parts = self._parts, []
            if not self.is_closing():
                self._transport.writelines(parts)

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size() + sum(map(len, self._parts))

    def close(self) -> None:
        """Close after what was written."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._parts.clear()
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class ResponseStream:
    """The connection under one response.

    Attributes:
        chunked: whether what goes to `sink` has to be framed as HTTP chunks; known after `open`.
        sink: takes framed bytes after the first `write`, with which the head leaves; never blocks, and must not be
            called once the client is gone, or while `paused` more than in passing. Known after `open`.
    """

    __slots__ = ("_cycle", "_on_lost", "_on_pause", "_protocol", "chunked", "sink")

    def __init__(self, protocol: StreamingProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._on_lost: Callable[[], None] | None = None
        self._on_pause: Callable[[], None] | None = None
        self.chunked = True
        self.sink: Callable[[bytes], None] = _drop

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Have `on_lost` called once if the client goes away; at once if it is gone. The body must have been read."""
        if self.gone:
            on_lost()
            return
        self._on_lost = on_lost
        self._protocol.watched = self

    def open(self, on_pause: Callable[[], None]) -> None:
        """To be called right before the response's start is sent, without a content length.

        Args:
            on_pause: called when the client is so far behind that no more should be written before `drain`.
        """
        self._on_pause = on_pause
        cycle = self._cycle
        if cycle.scope["http_version"] == "1.0":
            # Chunks came with 1.1: the end of the connection is the end of this body. `send` writes no body then.
            cycle.chunked_encoding = self.chunked = False
        if cycle.scope["method"] != "HEAD":
            self.sink = self._protocol.transport.direct

    def write(self, data: bytes) -> None:
        """Add to the body, with the head if that has not left; nothing if the client is gone."""
        if self.gone:
            return
        if self.sink is _drop:
            data = b""
        elif self.chunked and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._protocol.transport.flush(data)

    @property
    def gone(self) -> bool:
        """Nothing more can reach the client."""
        return self._cycle.disconnected or self._cycle.transport.is_closing()

    @property
    def buffered(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._cycle.transport.get_write_buffer_size()

    @property
    def paused(self) -> bool:
        """The client is behind."""
        return self._cycle.flow.write_paused

    async def drain(self) -> None:
        """Wait until the client is not behind, or gone."""
        await self._cycle.flow.drain()

    async def finish(self, send: Send, data: bytes) -> None:
        """Add the last bytes and end the response.

        Args:
            send: the application's, so that middleware sees the end.
        """
        if not self.chunked:
            await self.drain()
            self.write(data)
            data = b""
        await send({"type": "http.response.body", "body": data, "more_body": False})
        self.release()

    def release(self) -> None:
        """Call nobody any more."""
        self._on_lost = self._on_pause = None
        if self._protocol.watched is self:
            self._protocol.watched = None

    def cut(self) -> None:
        """Close the connection at once, whatever is unread."""
        self._cycle.transport.abort()

    def lost(self) -> None:
        """The protocol says that the connection is gone."""
        on_lost = self._on_lost
        self.release()
        if on_lost is not None:
            on_lost()

    def pause(self) -> None:
        """The protocol says that the client is behind."""
        if self._on_pause is not None:
            self._on_pause()


class StreamingProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a `ResponseStream` for each request.

    Attributes:
        transport: a `CorkedTransport`.
        watched: the response that is told about its client; a connection answers one request at a time.
    """

    watched: ResponseStream | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Cork the connection."""
        super().connection_made(transport)
        self.transport: Any = CorkedTransport(transport, self.loop)

    def on_response_complete(self) -> None:
        """Send the answer before anything else happens."""
        self.transport.flush()
        super().on_response_complete()

    def on_headers_complete(self) -> None:
        """The request's task is made here and runs later."""
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
            extensions[EXTENSION] = ResponseStream(self, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the response that is running."""
        super().connection_lost(exc)
        if self.watched is not None:
            self.watched.lost()

    def pause_writing(self) -> None:
        """Tell the response that is running."""
        super().pause_writing()
        if self.watched is not None:
            self.watched.pause()
