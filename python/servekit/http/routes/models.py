"""`GET /v1/models` and `GET /v1/models/{name}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from servekit.http.answers import ModelCard, ModelList
from servekit.http.generation import check_model, manager_of
from servekit.http.openapi import describe_answer

router = APIRouter()


@router.get("/v1/models", openapi_extra=describe_answer(ModelList))
async def models(request: Request) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_card(request)]}


@router.get("/v1/models/{name:path}", openapi_extra=describe_answer(ModelCard))
async def model(request: Request, name: str) -> dict[str, Any]:
    """A model by its name."""
    check_model(manager_of(request), name)
    return _card(request)


def _card(request: Request) -> dict[str, Any]:
    info = manager_of(request).config.model_info
    return {
        "id": info.name,
        "object": "model",
        "created": request.app.state.started_at,
        "owned_by": "servekit",
        "root": info.name,
        "parent": None,
        "max_model_len": info.max_model_len,
    }
