"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from servekit.http.answers import EmbeddingList
from servekit.http.body import read_body
from servekit.http.generation import embed, manager_of
from servekit.http.openapi import describe_body
from servekit.http.prompts import PROMPTS_SCHEMA, Prompts, encode_prompts, prompts_of
from servekit.http.sse import json_value
from servekit.tokenizer.encoding import TextEncoder, unpack_floats
from servekit.tokenizer.manager import TokenizerManager
from servekit.tokenizer.options import EmbeddingOptions
from servekit.tokenizer.state import Prompt

router = APIRouter()


class EmbeddingRequest(EmbeddingOptions, kw_only=True):
    """Texts, or ids, to make vectors of; each has length 1.

    Attributes:
        input: text, list of texts, token ids, or list of lists of token ids.
        encoding_format: `float` gives lists of numbers, `base64` little-endian float32.
    """

    input: Prompts | None = None


@router.post(
    "/v1/embeddings",
    openapi_extra=describe_body(
        EmbeddingRequest, needs={"model": None, "input": PROMPTS_SCHEMA}, answer=EmbeddingList, ranked=True
    ),
)
async def embeddings(request: Request) -> Response:
    """Vectors of one or more texts."""
    manager = manager_of(request)
    body = await read_body(request, EmbeddingRequest, manager.config.server_args.max_body_size)
    inputs = prompts_of(body.input, manager.config.model_info, "input")
    choices = await embed(
        request,
        manager,
        body,
        prompts=len(inputs),
        size=sum(map(len, inputs)),
        tokenize=lambda: _tokenize(manager, inputs),
    )
    tokens = sum(choice.prompt_tokens for choice in choices)
    as_text = body.encoding_format == "base64"
    answer: dict[str, Any] = {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": choice.index,
                "embedding": base64.b64encode(choice.vector).decode() if as_text else unpack_floats(choice.vector),
            }
            for choice in choices
        ],
        "model": manager.config.model_info.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return Response(json_value(answer), media_type="application/json")


async def _tokenize(manager: TokenizerManager, inputs: list[str | list[int]]) -> list[Prompt]:
    size = sum(len(each) for each in inputs if isinstance(each, str))
    made: list[Prompt] = await manager.encoder.run(size, _encode, manager.encoder, inputs)
    return made


def _encode(encoder: TextEncoder, inputs: list[str | list[int]]) -> list[Prompt]:
    return [Prompt(ids) for ids in encode_prompts(encoder, inputs, True)]
