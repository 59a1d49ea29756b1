"""FastAPI with a short way to endpoints that need nothing of it.

Between a connection and an endpoint FastAPI keeps dependencies, parameters, response models and a dozen layers of
coroutines. An endpoint that takes only the request and returns a `Response` uses none of that, so it is called at once:
a route file is written as ever, and the schema, unknown paths and every other kind of endpoint stay FastAPI's.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class Application(FastAPI):
    """FastAPI; routers whose endpoints may be called at once are included with `include_directly`."""

    def include_directly(self, routers: Iterable[APIRouter]) -> None:
        """Include routers; of their endpoints the plain ones are called without FastAPI's machinery."""
        self._plain: dict[tuple[str, str], Endpoint] = {}
        for router in routers:
            self.include_router(router)
            self._plain.update(_plain_endpoints(router))

    def build_middleware_stack(self) -> ASGIApp:
        """Middleware that was added stands around both ways."""
        added, self.user_middleware = self.user_middleware, []
        try:
            stack: ASGIApp = _ShortWay(self, self._plain, super().build_middleware_stack())
        finally:
            self.user_middleware = added
        for cls, args, kwargs in reversed(added):
            stack = cls(stack, *args, **kwargs)
        return stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, without looking whether FastAPI's telemetry was set up meanwhile, as it does for each request."""
        if self.root_path:
            scope["root_path"] = self.root_path
        scope["app"] = self
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        await self.middleware_stack(scope, receive, send)


def _plain_endpoints(router: APIRouter) -> dict[tuple[str, str], Endpoint]:
    if router.dependencies:
        return {}
    return {
        (method, route.path): route.endpoint
        for route in router.routes
        if isinstance(route, APIRoute) and not route.dependencies and "{" not in route.path and _plain(route.endpoint)
        for method in route.methods or ()
    }


def _plain(endpoint: Callable[..., Any]) -> bool:
    hints = typing.get_type_hints(endpoint)
    returned = hints.pop("return", None)
    return (
        inspect.iscoroutinefunction(endpoint)
        and len(inspect.signature(endpoint).parameters) == 1
        and list(hints.values()) == [Request]
        and inspect.isclass(returned)
        and issubclass(returned, Response)
    )


class _ShortWay:
    def __init__(self, app: FastAPI, plain: dict[tuple[str, str], Endpoint], long_way: ASGIApp) -> None:
        self._app = app
        self._plain = plain
        self._long_way = long_way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and not scope.get("root_path"):
            endpoint = self._plain.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._long_way(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except Exception as error:  # noqa: BLE001
            # Whatever it is, the application's handlers make an answer of it, as on the long way.
            response = await self._handler(type(error))(request, error)
        await response(scope, receive, send)

    def _handler(self, raised: type[Exception]) -> Callable[[Request, Exception], Awaitable[Response]]:
        handlers: dict[Any, Any] = self._app.exception_handlers
        found: Callable[[Request, Exception], Awaitable[Response]] = next(
            handlers[cls] for cls in raised.__mro__ if cls in handlers
        )
        return found
