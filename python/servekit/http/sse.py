"""Server-sent events: ready-made bytes around the escaped text, and the response that writes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def json_text(text: str) -> bytes:
    """A JSON string. What some clients take for line ends (U+0085, U+2028, U+2029) is escaped too."""
    encoded = _encode(text)
    if not text.isascii():
        encoded = (
            encoded.replace(b"\xe2\x80\xa8", rb"\u2028")
            .replace(b"\xe2\x80\xa9", rb"\u2029")
            .replace(b"\xc2\x85", rb"\u0085")
        )
    return encoded


def json_value(value: Any) -> bytes:
    """Compact JSON of plain values."""
    return _encode(value)


def event(body: bytes) -> bytes:
    """One event of one line."""
    return b"data: " + body + b"\n\n"


class EventStream(Response):
    """A response whose body is written piece by piece.

    Args:
        pieces: bytes of whole events; it must not raise.
        close: called once at the end, also when the client is gone.
    """

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(
            headers={
                "cache-control": "no-cache",
                "content-type": "text/event-stream; charset=utf-8",
                "x-accel-buffering": "no",
            }
        )
        self._pieces = pieces
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head with the first piece, then every piece as it comes."""
        try:
            headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()
