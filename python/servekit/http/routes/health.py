"""`GET /health`, alias `/ping`, says whether the server is alive, `GET /ready` whether it would take a request now."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from servekit.http.errors import error_response
from servekit.http.generation import manager_of
from servekit.tokenizer.manager import CONTROL_SILENCE_S, TokenizerManager
from servekit.tokenizer.refusal import Refusal

router = APIRouter()


@router.get("/health")
@router.get("/ping")
@router.head("/health", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 once the server has been ready, as long as its control process is heard and one rank lives."""
    manager = manager_of(request)
    page = manager.page
    why = None
    if not page.ready_once:
        why = "the server is starting"
    elif manager.silence.seconds() > CONTROL_SILENCE_S:
        why = f"the control process has not been heard for {CONTROL_SILENCE_S:g} s"
    elif not any(page.active_ranks()):
        why = "no rank is alive"
    return _answer(manager, why)


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(request: Request) -> Response:
    """200 exactly when a request sent now would be taken."""
    manager = manager_of(request)
    why = manager.why_not()
    if why is None and not any(manager.page.active_ranks()):
        why = "no rank is alive"
    if why is None and not manager.has_room():
        why = "the server is full"
    return _answer(manager, why)


def _answer(manager: TokenizerManager, why: str | None) -> Response:
    facts: dict[str, Any] = {
        "status": "ok" if why is None else "unavailable",
        "ranks_down": [rank for rank, active in enumerate(manager.page.active_ranks()) if not active],
    }
    if why is not None:
        return error_response(Refusal(503, why, code="unavailable", retry_after=1), **facts)
    return Response(msgspec.json.encode(facts), media_type="application/json")
