"""What one prompt of a request asks of the ranks, and the messages that say so."""

from __future__ import annotations

from dataclasses import dataclass

from servekit.messages.envelope import Ext, room_ext, text_ext
from servekit.messages.requests import SamplingParams, TokenizedGenerateReqInput
from servekit.tokenizer import options as opt
from servekit.tokenizer.logprobs import LogprobOptions
from servekit.tokenizer.state import Prompt


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


def generate_body(
    ask: Ask, rid: int, packed: bytes, params: SamplingParams, rank: int, room: int | None, received_at: float
) -> TokenizedGenerateReqInput:
    """The message of one choice.

    Args:
        ask: what it is part of.
        rid: its id.
        packed: the prompt's ids as they travel.
        params: how its tokens are chosen.
        rank: named by the client, -1 for none.
        room: its bootstrap room.
        received_at: Unix time in seconds.
    """
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


def extensions(options: opt.GenerationOptions, room: int | None) -> list[tuple[int, bytes]]:
    """What the envelope says of the options."""
    exts = [text_ext(opt.text_options(options))]
    if room is not None:
        exts.append(room_ext(room))
    if options.priority is not None:
        exts.append((Ext.PRIORITY, options.priority.to_bytes(4, "little", signed=True)))
    if options.cache_salt is not None:
        exts.append((Ext.CACHE_SALT, options.cache_salt.encode()))
    return exts
