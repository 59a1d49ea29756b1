"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import Response

from servekit.http.answers import Completion
from servekit.http.body import read_body
from servekit.http.generation import generate, manager_of
from servekit.http.logprobs import TokenTexts, completion_logprobs
from servekit.http.openapi import describe_body
from servekit.http.prompts import PROMPTS_SCHEMA, Prompts, encode_prompts, prompts_of
from servekit.http.shapes import Head, ended, ending
from servekit.http.sse import json_text, json_value
from servekit.tokenizer.ask import Ask
from servekit.tokenizer.encoding import TextEncoder, unpack_ids
from servekit.tokenizer.logprobs import LogprobOptions
from servekit.tokenizer.manager import TokenizerManager
from servekit.tokenizer.options import MAX_N, MAX_TOP_LOGPROBS, GenerationOptions, unsupported
from servekit.tokenizer.refusal import Refusal
from servekit.tokenizer.state import Choice, Job, Prompt

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationOptions, kw_only=True):
    """A raw prompt to go on with.

    Attributes:
        prompt: text, list of texts, token ids, or list of lists of token ids.
        echo: begin the answer with the prompt.
        best_of: make that many answers and show the `n` whose tokens were the likeliest on average.
        logprobs: how many of the likeliest tokens to show at each position.
        add_special_tokens: put the model's special tokens around prompts that are text; true by default.
    """

    prompt: Prompts | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    top_logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def wanted(self) -> int:
        """Answers to show for each prompt."""
        return self.n or 1

    @property
    def choices(self) -> int:
        """Answers to make for each prompt."""
        return self.best_of or self.wanted


@router.post(
    "/v1/completions",
    openapi_extra=describe_body(
        CompletionRequest,
        needs={"model": None, "prompt": PROMPTS_SCHEMA},
        # Taken, so that who sends it hears where it belongs.
        shown={"top_logprobs": None},
        answer=Completion,
        streams=True,
        ranked=True,
    ),
)
async def completions(request: Request) -> Response:
    """Go on with one or more prompts."""
    manager = manager_of(request)
    body = await read_body(request, CompletionRequest, manager.config.server_args.max_body_size)
    _check(body)
    texts = prompts_of(body.prompt, manager.config.model_info, "prompt")
    return await generate(
        request,
        manager,
        [body] * len(texts),
        size=sum(map(len, texts)),
        tokenize=lambda: _tokenize(manager, texts, body),
        shape=_CompletionShape(body, manager),
    )


def _check(body: CompletionRequest) -> None:
    if body.suffix:
        raise unsupported("suffix")
    if body.top_logprobs:
        raise Refusal(400, "top_logprobs is for the chat route: logprobs is a number here", param="top_logprobs")
    if body.best_of is not None and body.best_of < body.wanted:
        raise Refusal(400, f"best_of must be at least n, which is {body.wanted}", param="best_of")
    if body.streamed and body.choices > body.wanted:
        raise Refusal(400, "best_of above n can't be streamed: the best is known at the end", param="best_of")


async def _tokenize(manager: TokenizerManager, texts: list[str | list[int]], body: CompletionRequest) -> list[Ask]:
    size = sum(len(text) for text in texts if isinstance(text, str) or body.echo)
    made: list[Ask] = await manager.encoder.run(size, _encode, manager.encoder, texts, body)
    return made


def _encode(encoder: TextEncoder, texts: list[str | list[int]], body: CompletionRequest) -> list[Ask]:
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    logprobs = None
    if body.logprobs is not None:
        logprobs = LogprobOptions(body.logprobs, 0 if body.echo else -1)
    elif body.choices > body.wanted:
        logprobs = LogprobOptions()
    made = []
    encoded = encode_prompts(encoder, texts, body.add_special_tokens is not False)
    for ids, echoed in zip(encoded, texts, strict=True):
        if not isinstance(echoed, str):
            echoed = encoder.decode(ids, body.skip_special_tokens is not False) if body.echo else ""
        prompt = Prompt(ids, echoed)
        made.append(Ask(prompt, body, limit, logprobs))
    return made


class _CompletionShape:
    """Answers of this route."""

    def __init__(self, body: CompletionRequest, manager: TokenizerManager) -> None:
        self._head = Head("cmpl", "text_completion", manager.config.model_info.name, body)
        self.names = (self._head.id,)
        self._echo = bool(body.echo)
        self._ids = bool(body.return_token_ids)
        self._wanted, self._made = body.wanted, body.choices
        self._begun: set[int] = set()
        self._pieces = None if body.logprobs is None else manager.encoder.pieces
        self._skip_special = body.skip_special_tokens is not False
        self._texts: dict[int, TokenTexts] = {}

    def whole(self, job: Job) -> bytes:
        """See `Shape`."""
        choices = job.choices
        if self._made > self._wanted:
            groups = [choices[i : i + self._made] for i in range(0, len(choices), self._made)]
            choices = [choice for group in groups for choice in sorted(group, key=_unlikeliness)[: self._wanted]]
        return self._head.whole([self._choice(i, choice) for i, choice in enumerate(choices)], job)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text, ids = choice.take()
        members = {
            "index": index,
            "text": choice.prompt.text + text if self._echo else text,
            "logprobs": self._logprobs(choice),
            **ending(choice),
        }
        if self._ids:
            members |= {"prompt_token_ids": choice.prompt.ids, "token_ids": unpack_ids(ids)}
        return members

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Logprobs of the new tokens since the last call, an echo's before them; None if the client wants none."""
        if self._pieces is None or choice.logprobs is None:
            return None
        texts = self._texts.get(choice.index)
        found: dict[str, Any] = {}
        if texts is None:
            echoed = choice.prompt.text if self._echo else ""
            texts = self._texts[choice.index] = TokenTexts(self._pieces, self._skip_special, len(echoed))
            if self._echo:
                found = completion_logprobs(choice.logprobs.prompt, TokenTexts(self._pieces, self._skip_special))
        new = completion_logprobs(choice.logprobs.take(), texts)
        return {key: found.get(key, []) + values for key, values in new.items()}

    def chunks(self, choice: Choice) -> list[bytes]:
        """See `Shape`."""
        text, ids = choice.take()
        first = choice.index not in self._begun
        if first and self._echo:
            text = choice.prompt.text + text
        if not text and not ids and not ended(choice):
            return []
        self._begun.add(choice.index)
        logprobs = json_value(self._logprobs(choice))
        json = b'{"index":%d,"text":%b,"logprobs":%b' % (choice.index, json_text(text), logprobs)
        if self._ids:
            members: dict[str, Any] = {"token_ids": unpack_ids(ids)}
            if first:
                members["prompt_token_ids"] = choice.prompt.ids
            json += b"," + json_value(members)[1:-1]
        end = b"," + json_value(ending(choice))[1:] if ended(choice) else b',"finish_reason":null}'
        return [self._head.chunk(json + end, choice)]

    def template(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """See `Shape`."""
        if self._ids or choice.logprobs is not None or choice.index not in self._begun:
            return None
        before = b'{"index":%d,"text":' % choice.index
        return self._head.template(before, b',"logprobs":null,"finish_reason":null}')

    def usage(self, job: Job) -> bytes:
        """See `Shape`."""
        return self._head.usage(job)


def _unlikeliness(choice: Choice) -> float:
    """Smaller for answers whose tokens were likelier on average."""
    total = choice.logprobs.total if choice.logprobs is not None else 0.0
    return -total / max(1, choice.completion_tokens)
