"""Server-sent events: ready-made bytes around the escaped text."""

from __future__ import annotations

from typing import Any

import msgspec

from servekit._core import escape_json

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def json_text(text: str) -> bytes:
    """A JSON string. What some clients take for line ends (U+0085, U+2028, U+2029) is escaped too."""
    return b'"' + escape_json(text) + b'"'


def json_value(value: Any) -> bytes:
    """Compact JSON of plain values."""
    return _encode(value)


def event(body: bytes) -> bytes:
    """One event of one line."""
    return b"data: " + body + b"\n\n"
