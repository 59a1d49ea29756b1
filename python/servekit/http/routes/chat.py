"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from servekit.http.answers import ChatCompletion
from servekit.http.body import read_body
from servekit.http.conversation import MESSAGES_SCHEMA, Message, Tool, check_conversation, render, size_of
from servekit.http.generation import generate, manager_of
from servekit.http.logprobs import TokenTexts, chat_logprobs
from servekit.http.openapi import describe_body
from servekit.http.shapes import Head, ended, ending
from servekit.http.sse import json_text, json_value
from servekit.tokenizer.ask import Ask
from servekit.tokenizer.chat_template import ChatTemplate
from servekit.tokenizer.encoding import TextEncoder, unpack_ids
from servekit.tokenizer.logprobs import LogprobOptions
from servekit.tokenizer.manager import TokenizerManager
from servekit.tokenizer.options import MAX_TOP_LOGPROBS, GenerationOptions, NaturalInt, unsupported
from servekit.tokenizer.refusal import Refusal
from servekit.tokenizer.state import Choice, Job, Prompt

router = APIRouter()


class ChatCompletionRequest(GenerationOptions, kw_only=True):
    """A conversation to answer. `max_completion_tokens` is the newer name of `max_tokens` and goes first."""

    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: NaturalInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None


_SHOWN: dict[str, Any] = {
    "tool_choice": {"enum": ["auto", "none", None], "default": None},
    "modalities": {"enum": [["text"], None], "default": None},
    "functions": None,
    "function_call": None,
    "audio": None,
}


@router.post(
    "/v1/chat/completions",
    openapi_extra=describe_body(
        ChatCompletionRequest,
        needs={"model": None, "messages": MESSAGES_SCHEMA},
        shown=_SHOWN,
        answer=ChatCompletion,
        streams=True,
        ranked=True,
    ),
)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    manager = manager_of(request)
    body = await read_body(request, ChatCompletionRequest, manager.config.server_args.max_body_size)
    _check(body)
    template = check_conversation(body, request.app.state.chat_template)
    return await generate(
        request,
        manager,
        [body],
        size=size_of(body),
        tokenize=lambda: _tokenize(manager, template, body),
        shape=_ChatShape(body, manager),
    )


def _check(body: ChatCompletionRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise Refusal(400, "top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    for field in ("functions", "function_call", "audio"):
        if getattr(body, field) not in (None, [], "none", "auto"):
            raise unsupported(field)
    if body.modalities not in (None, ["text"]):
        raise unsupported("modalities")
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return
    if choice == "required":
        raise Refusal(
            400,
            "tool_choice 'required' is not supported by this server yet",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if isinstance(choice, str):
        raise Refusal(400, "tool_choice must be 'auto', 'none', 'required' or a named tool", param="tool_choice")
    raise Refusal(
        400,
        "a named tool in tool_choice is not supported by this server yet",
        param="tool_choice",
        code="unsupported_parameter",
    )


async def _tokenize(manager: TokenizerManager, template: ChatTemplate, body: ChatCompletionRequest) -> list[Ask]:
    made: list[Ask] = await manager.encoder.run(size_of(body), _encode, manager.encoder, template, body)
    return made


def _encode(encoder: TextEncoder, template: ChatTemplate, body: ChatCompletionRequest) -> list[Ask]:
    prompt = Prompt(encoder.encode_rendered(render(body, template)))
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return [Ask(prompt, body, limit, LogprobOptions(body.top_logprobs or 0) if body.logprobs else None)]


class _ChatShape:
    """Answers of this route."""

    def __init__(self, body: ChatCompletionRequest, manager: TokenizerManager) -> None:
        kind = "chat.completion.chunk" if body.streamed else "chat.completion"
        self._head = Head("chatcmpl", kind, manager.config.model_info.name, body)
        self.names = (self._head.id,)
        self._ids = bool(body.return_token_ids)
        self._begun: set[int] = set()
        self._pieces = manager.encoder.pieces if body.logprobs else None
        self._skip_special = body.skip_special_tokens is not False
        self._texts: dict[int, TokenTexts] = {}

    def whole(self, job: Job) -> bytes:
        """See `Shape`."""
        more = {"prompt_token_ids": job.choices[0].prompt.ids} if self._ids else {}
        return self._head.whole([self._choice(choice) for choice in job.choices], job, **more)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text, ids = choice.take()
        members = {
            "index": choice.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(choice),
            **ending(choice),
        }
        if self._ids:
            members["token_ids"] = unpack_ids(ids)
        return members

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Logprobs of the new tokens since the last call; None if the client wants none."""
        if self._pieces is None or choice.logprobs is None:
            return None
        texts = self._texts.get(choice.index)
        if texts is None:
            texts = self._texts[choice.index] = TokenTexts(self._pieces, self._skip_special)
        return chat_logprobs(choice.logprobs.take(), texts)

    def chunks(self, choice: Choice) -> list[bytes]:
        """See `Shape`. The first delta of a choice has the role, the last one is empty."""
        text, ids = choice.take()
        end = ended(choice)
        # A token without a text, as most end tokens are, has a logprob all the same.
        scored = choice.logprobs is not None and choice.logprobs.waits
        if not text and not ids and not end:
            return []
        events = []
        index = b'{"index":%d,"delta":' % choice.index
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            role = index + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            if self._ids:
                role += b"," + json_value({"prompt_token_ids": choice.prompt.ids})[1:-1]
            events.append(self._head.chunk(role + b"}", choice))
        if text or ids or scored:
            piece = index + b'{"content":' + json_text(text) + b'},"logprobs":' + json_value(self._logprobs(choice))
            piece += b',"finish_reason":null'
            if self._ids:
                piece += b',"token_ids":' + json_value(unpack_ids(ids))
            events.append(self._head.chunk(piece + b"}", choice))
        if end:
            events.append(self._head.chunk(index + b'{},"logprobs":null,' + json_value(ending(choice))[1:], choice))
        return events

    def template(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """See `Shape`."""
        if self._ids or choice.logprobs is not None or choice.index not in self._begun:
            return None
        before = b'{"index":%d,"delta":{"content":' % choice.index
        return self._head.template(before, b'},"logprobs":null,"finish_reason":null}')

    def usage(self, job: Job) -> bytes:
        """See `Shape`."""
        return self._head.usage(job)
