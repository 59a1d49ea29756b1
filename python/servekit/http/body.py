"""Request bodies: bounded, read once, decoded and checked in one pass from the raw bytes."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from servekit.tokenizer.refusal import ClientGone, Refusal

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_MAX_WHY = 500
"""About the most characters of what a client is told of a wrong value, from either end."""

_AT = re.compile(r"^(?P<why>.*) - at (?:`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)

_FLOAT_FOR_INT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_MAX_EXACT = 2**53
"""From here on not every integer is a float of its own."""


@lru_cache
def _decoder(type_: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type_)


async def read_body(request: Request, type_: type[T], max_size: int, *, optional: bool = False) -> T:
    """The request's body as a structure.

    Args:
        optional: no body at all stands for the structure's defaults.

    Raises:
        Refusal: 413 too large; 415 no JSON by its content type; 400 no JSON, or not of this shape, naming the field.
        ClientGone: the client closed its connection before the body was complete.
    """
    _check_content_type(request.headers.get("content-type"))
    raw = await _read(request, max_size)
    if optional and not raw:
        return type_()
    try:
        body = _decode(raw, type_)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, f"the body is no valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply", code="invalid_json") from None
    if log.isEnabledFor(logging.DEBUG):
        _log_unknown(raw, type_)
    return body


def _decode(raw: bytes, type_: type[T]) -> T:
    """The body, in which 16.0 is an integer too: JSON has numbers only, and some languages write all of them so.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: see `read_body`.
    """
    try:
        body: T = _decoder(type_).decode(raw)
    except msgspec.ValidationError as error:
        if not _FLOAT_FOR_INT.match(str(error)):
            raise
        body = msgspec.convert(_with_integers(msgspec.json.decode(raw)), type_)
    return body


def _with_integers(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT else value
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    if isinstance(value, dict):
        return {key: _with_integers(each) for key, each in value.items()}
    return value


async def _read(request: Request, max_size: int) -> bytes:
    length = request.headers.get("content-length", "")
    # The parser takes what fits 64 bits: 20 digits.
    if length.isdigit() and len(length) <= 20 and int(length) > max_size:
        raise _too_large(max_size)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_size:
            raise _too_large(max_size)
        parts.append(part)
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_content_type(value: str | None) -> None:
    if value is None:
        return
    kind = value.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refusal(415, f"content type {kind[:80]!r} is not served: send application/json")


def _too_large(max_size: int) -> Refusal:
    return Refusal(413, f"the body is larger than the {max_size} bytes this server takes", code="body_too_large")


def _invalid(text: str) -> Refusal:
    # Some of msgspec's sentences repeat the value, which may be megabytes.
    match = _AT.match(text if len(text) <= 2 * _MAX_WHY else f"{text[:_MAX_WHY]}...{text[-_MAX_WHY:]}")
    if match is None:
        return Refusal(400, f"the body is not what this route takes: {text}", code="invalid_type")
    path = match["path"]
    return Refusal(400, f"{path}: {match['why']}", param=path, code="invalid_value")


def _log_unknown(raw: bytes, type_: type[msgspec.Struct]) -> None:
    try:
        sent = set(_decoder(dict[str, msgspec.Raw]).decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError):
        # What the structure skips is not checked as strictly as what is read.
        return
    if unknown := sorted(sent - set(type_.__struct_encode_fields__)):
        log.debug("ignored unknown fields: %s", ", ".join(name[:80] for name in unknown[:20]))
