"""The OpenAPI document: bodies that the handlers decode themselves, and errors as they really look."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from servekit.http.errors import ErrorResponse

_REF = "#/components/schemas/{name}"
_bodies: list[type[msgspec.Struct]] = [ErrorResponse]


def describe_body(type_: type[msgspec.Struct], *, required: bool = True) -> dict[str, Any]:
    """`openapi_extra` of a route that takes such a body; if it is not required, none stands for its defaults."""
    _bodies.append(type_)
    return {"requestBody": {"required": required, "content": _json(type_)}}


def install(app: FastAPI) -> None:
    """Put the bodies that `describe_body` was told of, and every route's errors, into the application's document."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = original()
        for path in document["paths"].values():
            for operation in path.values():
                responses = operation["responses"]
                # FastAPI's own answer to wrong parameters, which `errors.py` replaces.
                responses.pop("422", None)
                responses["4XX"] = {"description": "the request is at fault", "content": _json(ErrorResponse)}
                responses["5XX"] = {"description": "the server can't answer now", "content": _json(ErrorResponse)}
        _, components = msgspec.json.schema_components(_bodies, ref_template=_REF)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for replaced in ("HTTPValidationError", "ValidationError"):
            schemas.pop(replaced, None)
        schemas.update(components)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _json(type_: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=type_.__name__)}}}
