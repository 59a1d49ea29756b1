"""The way of a request that generates: admitted, tokenized, sent, and answered whole or piece by piece."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from fastapi import Request
from starlette.responses import Response

from servekit.http.event_stream import EventStream, first_events
from servekit.http.json_answer import JsonAnswer
from servekit.http.prompts import check_ids
from servekit.http.protocol import EXTENSION, ResponseStream
from servekit.http.shapes import Shape
from servekit.tokenizer import options as opt
from servekit.tokenizer.ask import Ask
from servekit.tokenizer.manager import MAX_CHOICES, TokenizerManager
from servekit.tokenizer.refusal import ClientGone, Refusal
from servekit.tokenizer.state import Choice, Job, Prompt

RANK_HEADER = "x-data-parallel-rank"

MAX_INPUTS = 2048
"""Most prompts to embed in one request."""

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


async def generate(
    request: Request,
    manager: TokenizerManager,
    options: Sequence[opt.GenerationOptions],
    *,
    size: int,
    tokenize: Callable[[], Awaitable[list[Ask]]],
    shape: Shape,
) -> Response:
    """Answer a request.

    Args:
        options: of each prompt, as decoded from the body; checked here. Model, rank, room and whether it is streamed
            are told by the first.
        size: characters, or ids, in all prompts.
        tokenize: makes the prompts; called after admission.
        shape: writes the answer.

    Raises:
        Refusal: the request can't be served, or failed before its first byte.
        ClientGone: nobody is left to answer.
    """
    first = options[0]
    check_model(manager, first.model)
    # Prompts with the same options share them, and there may be a thousand.
    different = {id(each): each for each in options}
    for each in different.values():
        opt.check(each)
    args = manager.config.server_args
    rank = opt.named_rank(first, request.headers.getlist(RANK_HEADER), args.data_parallel_size)
    messages = sum(each.choices for each in options)
    if messages > MAX_CHOICES:
        raise Refusal(400, f"n: {messages} choices in one request are more than {MAX_CHOICES}", param="n")
    uses = Counter(map(id, options)) if len(options) > 1 else {id(first): 1}
    for key, each in different.items():
        opt.check_room(each, args.load_balance_method, rank, uses[key] * each.choices)
        opt.check_stops(each, messages)
    job = manager.admit(messages, messages * (size // _CHARACTERS_PER_TOKEN) // len(options) + messages)
    job.names = shape.names
    let_go = _watch(request, manager, job)

    def close() -> None:
        let_go()
        manager.close(job)

    streaming = False
    try:
        await manager.turns.take()
        made = await tokenize()
        for ask in made:
            check_ids(ask.prompt.ids, manager.config.model_info.vocab_size, "prompt")
        if job.gone:
            raise ClientGone
        manager.submit(job, made, rank)
        if first.streamed:
            response = EventStream(manager, job, shape, await first_events(job, shape), close)
            streaming = True
            return response
        await job.finished()
        return JsonAnswer(shape.whole(job))
    finally:
        if not streaming:
            close()


async def embed(
    request: Request,
    manager: TokenizerManager,
    options: opt.EmbeddingOptions,
    *,
    prompts: int,
    size: int,
    tokenize: Callable[[], Awaitable[list[Prompt]]],
) -> list[Choice]:
    """Have prompts embedded: one choice each, with its vector.

    Args:
        options: as decoded from the body; checked here.
        prompts: how many there are.
        size: characters, or ids, in all of them.
        tokenize: makes the prompts; called after admission.

    Raises:
        Refusal, ClientGone: as for `generate`.
    """
    check_model(manager, options.model)
    rank = opt.named_rank(options, request.headers.getlist(RANK_HEADER), manager.config.server_args.data_parallel_size)
    if prompts > MAX_INPUTS:
        raise Refusal(400, f"input: {prompts} inputs in one request are more than {MAX_INPUTS}", param="input")
    job = manager.admit(prompts, size // _CHARACTERS_PER_TOKEN + prompts)
    let_go = _watch(request, manager, job)
    try:
        made = await tokenize()
        for prompt in made:
            check_ids(prompt.ids, manager.config.model_info.vocab_size, "input")
        if job.gone:
            raise ClientGone
        manager.submit_embeddings(job, made, options, rank)
        await job.finished()
        return job.choices
    finally:
        let_go()
        manager.close(job)


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
