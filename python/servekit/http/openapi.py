"""The OpenAPI document: bodies that the handlers decode themselves, answers, and errors as they really look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI

from servekit.http.errors import ErrorResponse

_REF = "#/components/schemas/{name}"
_RANK_HEADER = {
    "name": "X-Data-Parallel-Rank",
    "in": "header",
    "required": False,
    "description": "Rank that shall answer; the same as `data_parallel_rank` in the body.",
    "schema": {"type": "integer", "minimum": 0},
}
_components: dict[str, Any] = {}
_needed: dict[str, Mapping[str, Any]] = {}
_one_of: dict[str, Mapping[str, Any]] = {}


def describe_body(
    type_: type[msgspec.Struct],
    *,
    required: bool = True,
    needs: Mapping[str, Any] | None = None,
    one_of: Mapping[str, Any] | None = None,
    answer: Any = None,
    streams: bool = False,
    ranked: bool = False,
) -> dict[str, Any]:
    """`openapi_extra` of a route that decodes its body itself.

    Args:
        type_: the body.
        required: without it, no body stands for its defaults.
        needs: fields that have to be there although the type allows null, for a better error; with their schemas where
            the type can't tell them, else None.
        one_of: the same for fields of which exactly one has to be there.
        answer: type of the JSON answer, None to say nothing of it.
        streams: it may answer with server-sent events instead.
        ranked: it takes the header that names a rank.
    """
    _needed[type_.__name__] = needs or {}
    _one_of[type_.__name__] = one_of or {}
    extra: dict[str, Any] = {"requestBody": {"required": required, "content": _json(type_)}}
    if answer is not None:
        extra |= describe_answer(answer)
    if streams:
        events = {"description": "one JSON object in the data of each event, `[DONE]` in the last", "type": "string"}
        extra["responses"]["200"]["content"]["text/event-stream"] = {"schema": events}
    if ranked:
        extra["parameters"] = [_RANK_HEADER]
    return extra


def describe_answer(type_: Any) -> dict[str, Any]:
    """`openapi_extra` of a route whose JSON answer has that type."""
    return {"responses": {"200": {"content": _json(type_)}}}


def install(app: FastAPI) -> None:
    """Put what the routes described, and every route's errors, into the application's document."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = original()
        errors = _json(ErrorResponse)
        for path in document["paths"].values():
            for operation in path.values():
                responses = operation["responses"]
                # FastAPI's own answer to wrong parameters, which `errors.py` replaces.
                responses.pop("422", None)
                responses["4XX"] = {"description": "the request is at fault", "content": errors}
                responses["5XX"] = {"description": "the server can't answer now", "content": errors}
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for replaced in ("HTTPValidationError", "ValidationError"):
            schemas.pop(replaced, None)
        served = app.state.manager.config.model_info.name
        for name, component in _components.items():
            schemas[name] = _told(component, _needed.get(name, {}), _one_of.get(name, {}), served)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _told(
    component: dict[str, Any], needs: Mapping[str, Any], one_of: Mapping[str, Any], served: str
) -> dict[str, Any]:
    """A component with the fields that have to be there, and with the one name that `model` may have."""
    properties = dict(component.get("properties", {}))
    for field, schema in {**needs, **one_of}.items():
        forms = [form for form in properties[field].get("anyOf", [properties[field]]) if form != {"type": "null"}]
        properties[field] = schema or (forms[0] if len(forms) == 1 else {"anyOf": forms})
    if "model" in properties:
        name = {"type": "string", "enum": [served]}
        nullable = {"type": "null"} in properties["model"].get("anyOf", [])
        properties["model"] = {"anyOf": [name, {"type": "null"}]} if nullable else name
    told = {**component, "properties": properties}
    if needs:
        told["required"] = [*component.get("required", []), *needs]
    if one_of:
        told["oneOf"] = [{"required": [field]} for field in one_of]
    return told


def _json(type_: Any) -> dict[str, Any]:
    (schema,), components = msgspec.json.schema_components([type_], ref_template=_REF)
    _components.update(components)
    return {"application/json": {"schema": schema}}
