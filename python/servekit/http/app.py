"""The FastAPI application of one worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from servekit import __version__
from servekit.http import errors, openapi
from servekit.http.routes import ROUTERS
from servekit.http.short_way import Application
from servekit.tokenizer.chat_template import ChatTemplate
from servekit.tokenizer.manager import TokenizerManager


def create_app(
    manager: TokenizerManager,
    chat_template: ChatTemplate | None,
    scheduler_info: Callable[[], list[dict[str, Any]] | None],
    link_counters: Callable[[], dict[str, int]],
) -> FastAPI:
    """An application around a manager.

    Args:
        chat_template: None if the model has none.
        scheduler_info: what each rank told when it was ready, None before.
        link_counters: counters of the worker's sockets, for `/debug/state`.
    """
    app = Application(title="servekit", version=__version__, redoc_url=None)
    app.state.manager = manager
    app.state.chat_template = chat_template
    app.state.scheduler_info = scheduler_info
    app.state.link_counters = link_counters
    app.state.started_at = int(time.time())
    app.include_directly(ROUTERS)
    errors.install(app)
    openapi.install(app)
    return app
