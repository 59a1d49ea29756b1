"""One file a route. A route file has a `router`; `app.py` lists them."""

from __future__ import annotations

from servekit.http.routes import (
    chat,
    completions,
    control,
    debug,
    embeddings,
    generate,
    health,
    model_info,
    models,
    server_info,
    tokenize,
)

ROUTERS = (
    chat.router,
    completions.router,
    embeddings.router,
    generate.router,
    models.router,
    tokenize.router,
    health.router,
    server_info.router,
    model_info.router,
)
"""What clients ask."""

OPERATOR_ROUTERS = (debug.router, control.router)
"""What only operators may ask, see `keys.py`."""
