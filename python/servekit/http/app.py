"""The FastAPI application of one worker."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from servekit import __version__
from servekit.config.secrets import Secrets
from servekit.http import errors, openapi
from servekit.http.cors import Cors
from servekit.http.keys import KeyGuard
from servekit.http.metrics import registry_of
from servekit.http.routes import OPERATOR_ROUTERS, ROUTERS, metrics
from servekit.http.short_way import Application
from servekit.tokenizer.chat_template import ChatTemplate
from servekit.tokenizer.manager import CONTROL_SILENCE_S, TokenizerManager


def create_app(
    manager: TokenizerManager,
    chat_template: ChatTemplate | None,
    scheduler_info: Callable[[], list[dict[str, Any]] | None],
    link_counters: Callable[[], dict[str, int]],
    secrets: Secrets,
) -> FastAPI:
    """An application around a manager.

    Args:
        chat_template: None if the model has none.
        scheduler_info: what each rank told when it was ready, None before.
        link_counters: counters of the worker's sockets, for `/debug/state`.
        secrets: the keys.
    """
    args = manager.config.server_args
    app = Application(title="servekit", version=__version__, redoc_url=None, redirect_slashes=False)
    # Unlike uvicorn's setting, this fits proxies that cut the path off and proxies that do not.
    app.root_path = args.root_path
    app.state.manager = manager
    app.state.chat_template = chat_template
    app.state.scheduler_info = scheduler_info
    app.state.link_counters = link_counters
    app.state.started_at = int(time.time())
    app.state.routes = [route for router in (*ROUTERS, *OPERATOR_ROUTERS, metrics.router) for route in router.routes]
    app.include_directly((*ROUTERS, *OPERATOR_ROUTERS))
    if args.metrics:
        app.state.metrics = registry_of(manager.page, manager.config.port_args.main_pid, CONTROL_SILENCE_S)
        app.include_router(metrics.router)
    app.add_middleware(
        KeyGuard,
        secrets=secrets,
        operator_paths=[
            route.path for router in OPERATOR_ROUTERS for route in router.routes if isinstance(route, APIRoute)
        ],
        on_refusal=functools.partial(manager.meter.count, "unauthorized"),
    )
    if args.allowed_origins:
        # Outside of the guard, or a page could not read why it was refused.
        app.add_middleware(Cors, origins=args.allowed_origins)
    errors.install(app)
    openapi.install(app)
    return app
