"""What one prompt of a request asks of the ranks, and the messages that say so."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from servekit._core import prefix_hashes
from servekit.config.model_info import ModelInfo
from servekit.messages.envelope import FLAG_STREAM, Envelope, Ext, Group, Kind, group_ext, room_ext, text_ext
from servekit.messages.requests import SamplingParams, TokenizedGenerateReqInput
from servekit.tokenizer import options as opt
from servekit.tokenizer.encoding import pack_ids
from servekit.tokenizer.logprobs import LogprobOptions, Logprobs
from servekit.tokenizer.state import Choice, Prompt


@dataclass(frozen=True)
class Ask:
    """One prompt and what to make of it.

    Attributes:
        options: checked.
        limit: most tokens to generate for each choice, None for all that the context leaves.
        logprobs: which are wanted, None for none.
    """

    prompt: Prompt
    options: opt.GenerationOptions
    limit: int | None = None
    logprobs: LogprobOptions | None = None

    @property
    def scores_prompt(self) -> bool:
        """Logprobs of the prompt are wanted, for which a rank is needed even if nothing is generated."""
        return self.logprobs is not None and self.logprobs.start >= 0


class Planned(NamedTuple):
    """One choice before it is sent.

    Attributes:
        prompt: number of its prompt.
        params: without new tokens there is nothing to send.
    """

    prompt: int
    ask: Ask
    choice: Choice
    params: SamplingParams


def plan(asks: Sequence[Ask], model: ModelInfo, entropy: random.Random) -> list[Planned]:
    """The choices of a request, prompt by prompt.

    Args:
        asks: each with at least one id.
        model: what its context and its vocabulary are, and what its makers propose.
        entropy: seeds of choices whose client gave none.

    Raises:
        Refusal: a prompt does not fit the context, or an option does not fit the model.
    """
    planned: list[Planned] = []
    for number, ask in enumerate(asks):
        tokens = opt.token_limit(ask.limit, len(ask.prompt.ids), model.max_model_len)
        for i in range(ask.options.choices):
            params = opt.sampling_params(ask.options, tokens, model, opt.choice_seed(ask.options.seed, i, entropy))
            choice = Choice(len(planned), ask.prompt)
            if ask.logprobs is not None:
                choice.logprobs = Logprobs(prompt_only=tokens == 0)
            if tokens == 0 and ask.scores_prompt:
                choice.prompt_only = True
                params = msgspec.structs.replace(params, max_new_tokens=1)
            planned.append(Planned(number, ask, choice, params))
    return planned


def messages_of(
    planned: Sequence[Planned], rank: int, mint: Callable[[], int], *, decoded: bool = True, prefixes: bool = False
) -> Iterator[tuple[Choice, Envelope, TokenizedGenerateReqInput]]:
    """The messages of choices that want new tokens; these get their ids on the wire.

    Args:
        planned: all choices of a request.
        rank: named by the client, -1 for none.
        mint: makes an id.
        decoded: text comes back; ids alone otherwise.
        prefixes: name the prompts' prefixes, as `cache_aware` dispatch wants them.
    """
    received_at = time.time()
    group_id = 0
    packed: tuple[int, bytes] = (-1, b"")
    names: list[tuple[int, bytes]] = []
    exts: list[tuple[int, bytes]] = []
    rooms: dict[int, itertools.count[int]] = {}
    shown: opt.GenerationOptions | None = None
    for number, ask, choice, params in planned:
        if params.max_new_tokens == 0:
            continue
        choice.rid = rid = mint()
        group_id = group_id or rid
        options = ask.options
        room = options.bootstrap_room
        if room is not None:
            room = next(rooms.setdefault(id(options), itertools.count(room)))
        if room is not None or options is not shown:
            exts, shown = _extensions(options, room, decoded), options
        if packed[0] != number:
            packed = number, pack_ids(ask.prompt.ids)
            names = _prefixes(packed[1], options.cache_salt) if prefixes else []
        group = [group_ext(Group(group_id, choice.index, len(planned), number))] if len(planned) > 1 else []
        flags = FLAG_STREAM if options.streamed else 0
        envelope = Envelope(
            Kind.GENERATE, rid, flags, rank=rank, tokens=choice.prompt_tokens, exts=exts + names + group
        )
        yield choice, envelope, _body(ask, rid, packed[1], params, rank, room, received_at)


def _body(
    ask: Ask, rid: int, packed: bytes, params: SamplingParams, rank: int, room: int | None, received_at: float
) -> TokenizedGenerateReqInput:
    options, wanted = ask.options, ask.logprobs or LogprobOptions()
    return TokenizedGenerateReqInput(
        rid,
        packed,
        params,
        stream=options.streamed,
        return_logprob=ask.logprobs is not None,
        logprob_start_len=wanted.start,
        top_logprobs_num=wanted.top,
        token_ids_logprob=wanted.ids,
        bootstrap_host=options.bootstrap_host,
        bootstrap_port=options.bootstrap_port,
        bootstrap_room=room,
        data_parallel_rank=rank if rank >= 0 else None,
        priority=options.priority,
        cache_salt=options.cache_salt,
        received_at=received_at,
    )


def _prefixes(packed: bytes, salt: str | None) -> list[tuple[int, bytes]]:
    """Names of a prompt's prefixes, if it is long enough to have any."""
    hashes = prefix_hashes(packed, None if salt is None else salt.encode())
    return [(Ext.PREFIX_HASHES, hashes)] if hashes else []


def _extensions(options: opt.GenerationOptions, room: int | None, decoded: bool) -> list[tuple[int, bytes]]:
    exts = [text_ext(opt.text_options(options) if decoded else opt.ids_alone(options))]
    if room is not None:
        exts.append(room_ext(room))
    if options.priority is not None:
        exts.append((Ext.PRIORITY, options.priority.to_bytes(4, "little", signed=True)))
    if options.cache_salt is not None:
        exts.append((Ext.CACHE_SALT, options.cache_salt.encode()))
    return exts
