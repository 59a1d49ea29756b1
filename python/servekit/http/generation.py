"""The way of a request that generates: admitted, tokenized, sent, and answered whole or piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import Request
from starlette.responses import Response

from servekit.http.event_stream import EventStream, first_events
from servekit.http.protocol import EXTENSION, ResponseStream
from servekit.http.shapes import Shape
from servekit.tokenizer import options as opt
from servekit.tokenizer.manager import MAX_CHOICES, TokenizerManager
from servekit.tokenizer.refusal import ClientGone, Refusal
from servekit.tokenizer.state import Job, Prompt

RANK_HEADER = "x-data-parallel-rank"

_CHARACTERS_PER_TOKEN = 4


def check_model(manager: TokenizerManager, name: str | None) -> None:
    """A request must name the model that is served.

    Raises:
        Refusal: 400 it names none, 404 it names another.
    """
    served = manager.config.model_info.name
    if name is None:
        raise Refusal(400, f"model is missing: this server serves {served!r}", param="model", code="missing_model")
    if name != served:
        raise Refusal(
            404,
            f"the model {name[:200]!r} does not exist: this server serves {served!r}",
            param="model",
            code="model_not_found",
        )


def check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Token ids from a client.

    Raises:
        Refusal: there are none, or one is outside the vocabulary.
    """
    if not ids:
        raise Refusal(400, f"{param} must not be empty", param=param)
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise Refusal(400, f"{param}: token ids must be from 0 to {vocab_size - 1}", param=param)


async def generate(
    request: Request,
    manager: TokenizerManager,
    options: opt.GenerationOptions,
    *,
    prompts: int,
    size: int,
    limit: int | None,
    tokenize: Callable[[], Awaitable[list[Prompt]]],
    shape: Shape,
) -> Response:
    """Answer a request.

    Args:
        options: as decoded from the body; checked here.
        prompts: how many prompts it has.
        size: characters, or ids, in all of them.
        limit: most tokens to generate for a choice, None for what the context leaves.
        tokenize: makes the prompts; called after admission.
        shape: writes the answer.

    Raises:
        Refusal: the request can't be served, or failed before its first byte.
        ClientGone: nobody is left to answer.
    """
    check_model(manager, options.model)
    opt.check(options)
    args = manager.config.server_args
    rank = opt.named_rank(options, request.headers.getlist(RANK_HEADER), args.data_parallel_size)
    messages = prompts * options.choices
    if messages > MAX_CHOICES:
        raise Refusal(400, f"n: {messages} choices in one request are more than {MAX_CHOICES}", param="n")
    opt.check_stops(options, messages)
    job = manager.admit(messages, options.choices * (size // _CHARACTERS_PER_TOKEN + prompts))
    let_go = _watch(request, manager, job)

    def close() -> None:
        let_go()
        manager.close(job)

    streaming = False
    try:
        made = await tokenize()
        for prompt in made:
            check_ids(prompt.ids, manager.config.model_info.vocab_size, "prompt")
        if job.gone:
            raise ClientGone
        manager.submit(job, made, options, limit, rank)
        if options.streamed:
            response = EventStream(manager, job, shape, await first_events(job, shape), close)
            streaming = True
            return response
        await job.finished()
        return Response(shape.whole(job), media_type="application/json")
    finally:
        if not streaming:
            close()


def _watch(request: Request, manager: TokenizerManager, job: Job) -> Callable[[], None]:
    """Tell the job when its client goes away, until the returned function is called. The body has been read."""
    stream: ResponseStream | None = request.scope.get("extensions", {}).get(EXTENSION)
    if stream is not None:
        job.cut = stream.cut
        stream.watch(lambda: manager.leave(job))
        return stream.release
    gone = asyncio.ensure_future(_leave(request, manager, job))

    def let_go() -> None:
        gone.cancel()

    return let_go


async def _leave(request: Request, manager: TokenizerManager, job: Job) -> None:
    # All that can come after the body.
    while (await request.receive())["type"] != "http.disconnect":
        pass
    manager.leave(job)


def manager_of(request: Request) -> TokenizerManager:
    """The worker's `TokenizerManager`."""
    manager: TokenizerManager = request.app.state.manager
    return manager
