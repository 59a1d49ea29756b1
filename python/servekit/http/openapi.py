"""The OpenAPI document of bodies that the handlers decode themselves."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from servekit.http.errors import ErrorResponse

_REF = "#/components/schemas/{name}"
_bodies: list[type[msgspec.Struct]] = [ErrorResponse]


def describe_body(type_: type[msgspec.Struct]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes such a body and answers errors in OpenAI's shape."""
    _bodies.append(type_)
    error = {"application/json": {"schema": {"$ref": _REF.format(name=ErrorResponse.__name__)}}}
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REF.format(name=type_.__name__)}}},
        },
        "responses": {
            "4XX": {"description": "the request is at fault", "content": error},
            "5XX": {"description": "the server can't answer now", "content": error},
        },
    }


def install(app: FastAPI) -> None:
    """Put the structures that `describe_body` was told of into the application's document."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        document = original()
        _, components = msgspec.json.schema_components(_bodies, ref_template=_REF)
        document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
