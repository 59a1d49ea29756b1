"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from servekit.config.model_info import ModelInfo
from servekit.http.body import read_body
from servekit.http.generation import check_ids, generate, manager_of
from servekit.http.openapi import describe_body
from servekit.http.shapes import Head, ended, ending
from servekit.http.sse import json_text, json_value
from servekit.tokenizer.encoding import TextEncoder, unpack_ids
from servekit.tokenizer.manager import TokenizerManager
from servekit.tokenizer.options import GenerationOptions, token_limit, unsupported
from servekit.tokenizer.refusal import Refusal
from servekit.tokenizer.state import Choice, Job, Prompt

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationOptions, kw_only=True):
    """A raw prompt to go on with.

    Attributes:
        prompt: text, list of texts, token ids, or list of lists of token ids.
        echo: begin the answer with the prompt.
        add_special_tokens: put the model's special tokens around prompts that are text; true by default.
    """

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


@router.post("/v1/completions", openapi_extra=describe_body(CompletionRequest))
async def completions(request: Request) -> Response:
    """Go on with one or more prompts."""
    manager = manager_of(request)
    body = await read_body(request, CompletionRequest, manager.config.server_args.max_body_size)
    _check(body)
    texts = _prompts(body.prompt, manager.config.model_info)
    return await generate(
        request,
        manager,
        body,
        prompts=len(texts),
        size=sum(map(len, texts)),
        limit=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        tokenize=lambda: _tokenize(manager, texts, body),
        shape=_CompletionShape(body, manager),
    )


def _check(body: CompletionRequest) -> None:
    if body.logprobs is not None:
        raise unsupported("logprobs")
    if body.suffix:
        raise unsupported("suffix")
    if body.best_of is not None and body.best_of != body.choices:
        if body.best_of < body.choices:
            raise Refusal(400, "best_of must be at least n", param="best_of")
        raise unsupported("best_of")


def _prompts(prompt: str | list[Any] | None, model: ModelInfo) -> list[str | list[int]]:
    """The prompts, each a text or its ids.

    Raises:
        Refusal: there is none, they are of different kinds, ids do not fit the context, or one is outside the
            vocabulary.
    """
    if prompt is None:
        raise Refusal(400, "prompt is missing", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if not kinds:
        raise Refusal(400, "prompt must not be an empty list", param="prompt")
    if len(kinds) > 1:
        raise Refusal(400, "prompt: texts, ids and lists of ids can't be mixed", param="prompt")
    prompts: list[Any] = [prompt] if kinds == {int} else prompt
    for each in prompts:
        if isinstance(each, list):
            # Before anything that takes time for each of millions of ids.
            token_limit(None, len(each), model.max_model_len)
            check_ids(each, model.vocab_size, "prompt")
    return prompts


async def _tokenize(manager: TokenizerManager, texts: list[str | list[int]], body: CompletionRequest) -> list[Prompt]:
    size = sum(len(text) for text in texts if isinstance(text, str) or body.echo)
    made: list[Prompt] = await manager.encoder.run(size, _encode, manager.encoder, texts, body)
    return made


def _encode(encoder: TextEncoder, texts: list[str | list[int]], body: CompletionRequest) -> list[Prompt]:
    made = []
    for text in texts:
        if isinstance(text, str):
            made.append(Prompt(encoder.encode_prompt(text, body.add_special_tokens is not False), text))
        else:
            skip = body.skip_special_tokens is not False
            made.append(Prompt(text, encoder.decode(text, skip) if body.echo else ""))
    return made


class _CompletionShape:
    """Answers of this route."""

    def __init__(self, body: CompletionRequest, manager: TokenizerManager) -> None:
        self._head = Head("cmpl", "text_completion", manager.config.model_info.name, body)
        self._echo = bool(body.echo)
        self._ids = bool(body.return_token_ids)
        self._begun: set[int] = set()

    def whole(self, job: Job) -> bytes:
        """See `Shape`."""
        return self._head.whole([self._choice(choice) for choice in job.choices], job)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text, ids = choice.take()
        members = {
            "index": choice.index,
            "text": choice.prompt.text + text if self._echo else text,
            "logprobs": None,
            **ending(choice),
        }
        if self._ids:
            members |= {"prompt_token_ids": choice.prompt.ids, "token_ids": unpack_ids(ids)}
        return members

    def chunks(self, choice: Choice) -> list[bytes]:
        """See `Shape`."""
        text, ids = choice.take()
        first = choice.index not in self._begun
        if first and self._echo:
            text = choice.prompt.text + text
        if not text and not ids and not ended(choice):
            return []
        self._begun.add(choice.index)
        json = b'{"index":%d,"text":%b,"logprobs":null' % (choice.index, json_text(text))
        if self._ids:
            members: dict[str, Any] = {"token_ids": unpack_ids(ids)}
            if first:
                members["prompt_token_ids"] = choice.prompt.ids
            json += b"," + json_value(members)[1:-1]
        end = b"," + json_value(ending(choice))[1:] if ended(choice) else b',"finish_reason":null}'
        return [self._head.chunk(json + end, choice)]

    def template(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """See `Shape`."""
        if self._ids or choice.index not in self._begun:
            return None
        before = b'{"index":%d,"text":' % choice.index
        return self._head.template(before, b',"logprobs":null,"finish_reason":null}')

    def usage(self, job: Job) -> bytes:
        """See `Shape`."""
        return self._head.usage(job)
