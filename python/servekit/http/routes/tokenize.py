"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from servekit.http.answers import DetokenizedText, TokenList
from servekit.http.body import read_body
from servekit.http.conversation import MESSAGES_SCHEMA, Message, Tool, check_conversation, render, size_of
from servekit.http.generation import check_model, manager_of
from servekit.http.openapi import describe_body
from servekit.http.prompts import check_ids
from servekit.tokenizer.options import TokenId
from servekit.tokenizer.refusal import Refusal

router = APIRouter()


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text, or a conversation, to cut into tokens; `add_special_tokens` is true by default for a text."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Ids to make text of."""

    tokens: list[TokenId]
    model: str | None = None


@router.post(
    "/tokenize",
    openapi_extra=describe_body(
        TokenizeRequest, one_of={"prompt": None, "messages": MESSAGES_SCHEMA}, answer=TokenList
    ),
)
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation as the model sees it."""
    manager = manager_of(request)
    body = await read_body(request, TokenizeRequest, manager.config.server_args.max_body_size)
    if body.model is not None:
        check_model(manager, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Refusal(400, "one of prompt and messages is needed", param="prompt")
    encoder = manager.encoder
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
        ids = await encoder.run(len(text), encoder.encode_prompt, text, special)
    else:
        template = check_conversation(body, request.app.state.chat_template)
        ids = await encoder.run(size_of(body), lambda: encoder.encode_rendered(render(body, template)))
    return _json({"tokens": ids, "count": len(ids), "max_model_len": manager.config.model_info.max_model_len})


@router.post("/detokenize", openapi_extra=describe_body(DetokenizeRequest, answer=DetokenizedText))
async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    manager = manager_of(request)
    body = await read_body(request, DetokenizeRequest, manager.config.server_args.max_body_size)
    if body.model is not None:
        check_model(manager, body.model)
    if body.tokens:
        check_ids(body.tokens, manager.config.model_info.vocab_size, "tokens")
    text = await manager.encoder.run(4 * len(body.tokens), manager.encoder.decode, body.tokens)
    return _json({"prompt": text})


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
