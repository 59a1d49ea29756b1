"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`, whatever went wrong."""

from __future__ import annotations

import http
import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from servekit.tokenizer.refusal import ClientGone, Refusal

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
CLIENT_CLOSED_REQUEST = 499


class ErrorDetail(msgspec.Struct):
    """What went wrong; `param` names the field at fault, `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetail


def error_type(status: int) -> str:
    """OpenAI's name for a family of errors."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(refusal: Refusal) -> bytes:
    """JSON of an error, for a response or an event of a stream."""
    return msgspec.json.encode(
        ErrorResponse(ErrorDetail(refusal.message, error_type(refusal.status), refusal.param, refusal.code))
    )


def error_response(refusal: Refusal, headers: dict[str, str] | None = None, **more: Any) -> Response:
    """A whole error response; `more` are further members of its JSON object."""
    headers = dict(headers or {})
    if refusal.retry_after is not None:
        headers["retry-after"] = str(refusal.retry_after)
    body = error_body(refusal)
    if more:
        body = body[:-1] + b"," + msgspec.json.encode(more)[1:]
    return Response(body, refusal.status, headers, media_type="application/json")


def raw_error(refusal: Refusal) -> bytes:
    """A whole HTTP/1.1 response, for what is refused before or beside ASGI; its connection is to be closed."""
    status, body = http.HTTPStatus(refusal.status), error_body(refusal)
    retry = b"" if refusal.retry_after is None else b"retry-after: %d\r\n" % refusal.retry_after
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n%b"
        % (status, status.phrase.encode(), retry, len(body), body)
    )


async def _on_refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    if status == http.HTTPStatus.NOT_FOUND:
        message = f"there is no {request.url.path[:200]!r} here"
    elif status == http.HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.method} is not allowed on {request.url.path[:200]!r}"
    else:
        message = str(error.detail)
    headers = {k.lower(): v for k, v in (error.headers or {}).items()}
    if status == http.HTTPStatus.METHOD_NOT_ALLOWED:
        headers["allow"] = ", ".join(_methods(request)) or headers.get("allow", "")
    return error_response(Refusal(status, message), headers)


def _methods(request: Request) -> list[str]:
    """What the path takes. Starlette knows of one route only, and a path may have one a method."""
    found: set[str] = set()
    for route in getattr(request.app.state, "routes", ()):
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return sorted(found)


async def _on_validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])
    return error_response(Refusal(400, f"{param}: {first['msg']}", param=param or None))


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_depth(_request: Request, _error: Exception) -> Response:
    # Whatever recursed that deep followed the request's own nesting.
    return error_response(Refusal(400, "the request is nested too deeply", code="invalid_json"))


async def _on_fault(_request: Request, error: Exception) -> Response:
    log.error("a request failed inside the server", exc_info=error)
    return error_response(Refusal(500, "internal error; the server's log says more"))


def install(app: FastAPI) -> None:
    """Make the application answer every error in OpenAI's shape."""
    app.add_exception_handler(Refusal, _on_refusal)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(RecursionError, _on_depth)
    app.add_exception_handler(Exception, _on_fault)
