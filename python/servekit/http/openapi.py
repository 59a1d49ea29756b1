"""The OpenAPI document: bodies that the handlers decode themselves, answers, and errors as they really look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI

from servekit.http.errors import ErrorResponse
from servekit.tokenizer.options import TOKEN_ID_SCHEMA, Unbuilt


@dataclass(frozen=True)
class _View:
    """See `describe_body`."""

    needs: Mapping[str, Any]
    one_of: Mapping[str, Any]
    shown: Mapping[str, Any]


_REF = "#/components/schemas/{name}"
_RANK_HEADER = "X-Data-Parallel-Rank"
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "A JSON object; `[DONE]` in the last event."}},
}
"""One event of a stream, as the parser of a client sees it. OpenAPI has `itemSchema` for it from 3.2 on."""
_components: dict[str, Any] = {}
_views: dict[str, _View] = {}


def describe_body(
    type_: type[msgspec.Struct],
    *,
    required: bool = True,
    needs: Mapping[str, Any] | None = None,
    one_of: Mapping[str, Any] | None = None,
    shown: Mapping[str, Any] | None = None,
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
        shown: schemas of fields of which less is served than the type takes; None leaves a field out.
        answer: type of the JSON answer, None to say nothing of it.
        streams: it may answer with server-sent events instead.
        ranked: it takes the header that names a rank.
    """
    _views[type_.__name__] = _View(needs or {}, one_of or {}, shown or {})
    extra: dict[str, Any] = {"requestBody": {"required": required, "content": _json(type_)}}
    if answer is not None:
        extra |= describe_answer(answer)
    if streams:
        extra["responses"]["200"]["content"]["text/event-stream"] = {"itemSchema": _EVENT}
    if ranked:
        told = "Rank that shall answer; the same as `data_parallel_rank` in the body."
        extra["parameters"] = [{"name": _RANK_HEADER, "in": "header", "required": False, "description": told}]
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
        config = app.state.manager.config
        ranks = {"type": "integer", "minimum": 0, "maximum": config.server_args.data_parallel_size - 1}
        for path in document["paths"].values():
            for operation in path.values():
                for parameter in operation.get("parameters", ()):
                    if parameter["name"] == _RANK_HEADER:
                        parameter["schema"] = ranks
        for name, component in _components.items():
            shown = _shown(name, component, config.model_info.name, ranks)
            schemas[name] = _with_token_ids(shown, config.model_info.vocab_size)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _shown(name: str, component: dict[str, Any], served: str, ranks: dict[str, Any]) -> dict[str, Any]:
    """A component as the routes take it: without what they only refuse, with the model and the ranks that there are."""
    view = _views.get(name, _View({}, {}, {}))
    needs, one_of = view.needs, view.one_of
    properties = dict(component.get("properties", {}))
    unbuilt = Unbuilt.__struct_fields__ if name in _names_of_subclasses(Unbuilt) else ()
    for field, schema in {**dict.fromkeys(unbuilt), **view.shown}.items():
        if schema is None:
            properties.pop(field, None)
        else:
            properties[field] = schema
    given = {}
    for field, schema in {**needs, **one_of}.items():
        forms = [form for form in properties[field].get("anyOf", [properties[field]]) if form != {"type": "null"}]
        given[field] = schema or (forms[0] if len(forms) == 1 else {"anyOf": forms})
        # Of fields of which one has to be there, null stands for the others.
        properties[field] = given[field] if field in needs else {"anyOf": [given[field], {"type": "null"}]}
    if "data_parallel_rank" in properties:
        properties["data_parallel_rank"] = {"anyOf": [ranks, {"type": "null"}], "default": None}
    if "model" in properties:
        value = {"type": "string", "enum": [served]}
        nullable = {"type": "null"} in properties["model"].get("anyOf", [])
        properties["model"] = {"anyOf": [value, {"type": "null"}]} if nullable else value
    told = {**component, "properties": properties}
    if needs:
        told["required"] = [*component.get("required", []), *needs]
    if one_of:
        told["oneOf"] = [{"required": [field], "properties": {field: given[field]}} for field in one_of]
    return told


def _with_token_ids(schema: Any, vocab_size: int) -> Any:
    """A schema in which token ids are those of the vocabulary."""
    if isinstance(schema, list):
        return [_with_token_ids(each, vocab_size) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == TOKEN_ID_SCHEMA["format"]:
        as_text = {"type": "string", "pattern": _numbers_to(vocab_size - 1)}
        return as_text if "pattern" in schema else {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    return {name: _with_token_ids(each, vocab_size) for name, each in schema.items()}


def _numbers_to(last: int) -> str:
    """Pattern of the decimal numbers from 0 to `last`."""
    digits = str(last)
    shorter = [f"[0-9]{{1,{len(digits) - 1}}}"] if len(digits) > 1 else []
    less = [
        f"{digits[:at]}[0-{int(digit) - 1}][0-9]{{{len(digits) - at - 1}}}"
        for at, digit in enumerate(digits)
        if digit != "0"
    ]
    return f"^({'|'.join([*shorter, *less, digits])})$"


def _names_of_subclasses(cls: type[msgspec.Struct]) -> set[str]:
    names = {cls.__name__}
    for each in cls.__subclasses__():
        names |= _names_of_subclasses(each)
    return names


def _json(type_: Any) -> dict[str, Any]:
    (schema,), components = msgspec.json.schema_components([type_], ref_template=_REF)
    _components.update(components)
    return {"application/json": {"schema": schema}}
