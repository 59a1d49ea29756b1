"""Who may ask: the API keys on every route but the probes, and the stricter rules of operators' routes.

A pure ASGI middleware in front of the application, so that nothing is read or routed before; it adds nothing to what a
response costs. Operators' routes have a second guard of their own (`require_operator`), which only trusts this one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Collection

from fastapi import APIRouter, Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from servekit.config.secrets import Secrets
from servekit.http.errors import error_response
from servekit.tokenizer.refusal import Refusal

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""What balancers and orchestrators ask without a key."""

_OPERATOR = "servekit.operator"
"""Member of the scope of a request that may use operators' routes."""
_FOR_OTHERS = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"origin"})
"""Headers of proxies and of web pages: who is behind them is unknown, wherever they themselves run."""


class KeyGuard:
    """Answers 401 or 403 in place of the application where a request lacks the right.

    Args:
        app: what is guarded.
        secrets: the keys.
        operator_paths: routes of operators.
        on_refusal: called for every request that is refused.
    """

    def __init__(
        self, app: ASGIApp, secrets: Secrets, operator_paths: Collection[str], on_refusal: Callable[[], None]
    ) -> None:
        self._app = app
        self._keys = [bytes.fromhex(key) for key in secrets.api_keys]
        self._admin = [] if secrets.admin_api_key is None else [bytes.fromhex(secrets.admin_api_key)]
        self._operator_paths = frozenset(operator_paths)
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is allowed."""
        if scope["type"] != "lifespan" and (refusal := self._refusal(scope)) is not None:
            self._on_refusal()
            headers = {"www-authenticate": "Bearer"} if refusal.status == 401 else None
            await error_response(refusal, headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        path = _path(scope)
        if path in self._operator_paths:
            refusal = self._operator_refusal(scope)
            scope[_OPERATOR] = refusal is None
            return refusal
        if not self._keys or path in OPEN_PATHS or scope.get("method") == "OPTIONS":
            return None
        return _key_refusal(scope, self._keys, "API key")

    def _operator_refusal(self, scope: Scope) -> Refusal | None:
        if self._admin:
            return _key_refusal(scope, self._admin, "admin key")
        if not _is_local(scope):
            return Refusal(403, "this route is for loopback only unless the server has an --admin-api-key")
        return _key_refusal(scope, self._keys, "API key") if self._keys else None


def operator_router() -> APIRouter:
    """A router for routes of operators."""
    return APIRouter(dependencies=[Depends(require_operator)], tags=["operators"])


def require_operator(request: Request) -> None:
    """Let nobody pass whom `KeyGuard` did not check as an operator.

    Raises:
        Refusal: 403.
    """
    if not request.scope.get(_OPERATOR, False):
        raise Refusal(403, "this route is for operators only")


def _path(scope: Scope) -> str:
    """Path within the application, as Starlette routes it: with or without the root path of a proxy in front."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _key_refusal(scope: Scope, digests: list[bytes], what: str) -> Refusal | None:
    given = _bearer(scope)
    if given is None:
        return Refusal(401, f"this route needs the {what}, as header `authorization: Bearer KEY`", code="no_api_key")
    # All are compared, and digests only: how long it takes says nothing about a key.
    found = hashlib.sha256(given).digest()
    matched = False
    for digest in digests:
        matched |= hmac.compare_digest(found, digest)
    if not matched:
        return Refusal(401, f"this is not the {what}", code="invalid_api_key")
    return None


def _bearer(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
    return None


def _is_local(scope: Scope) -> bool:
    """Whether somebody on this machine asks, through loopback or a Unix socket, and not for somebody else."""
    if any(name in _FOR_OTHERS for name, _ in scope["headers"]):
        return False
    client = scope.get("client")
    if client is None:
        return True
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    # On a socket for both families, IPv4 clients come as mapped addresses.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
