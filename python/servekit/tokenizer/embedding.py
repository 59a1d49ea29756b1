"""Prompts to embed, as they go to the ranks, and their vectors, as they come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from servekit.messages.batches import BatchEmbeddingOutput, Tensor
from servekit.messages.envelope import Envelope, Kind
from servekit.messages.requests import TokenizedEmbeddingReqInput
from servekit.tokenizer import options as opt
from servekit.tokenizer.encoding import pack_ids
from servekit.tokenizer.refusal import Refusal
from servekit.tokenizer.state import Choice, Prompt


def plan_embeddings(prompts: Sequence[Prompt], max_model_len: int) -> list[Choice]:
    """One choice for each prompt.

    Raises:
        Refusal: a prompt is longer than the context.
    """
    for prompt in prompts:
        if (came := len(prompt.ids)) > max_model_len:
            message = f"this model's maximum context length is {max_model_len} tokens: this input has {came}"
            raise Refusal(400, message, param="input", code="context_length_exceeded")
    return [Choice(i, prompt) for i, prompt in enumerate(prompts)]


def embedding_messages_of(
    choices: Sequence[Choice], options: opt.EmbeddingOptions, rank: int, mint: Callable[[], int]
) -> Iterator[tuple[Choice, Envelope, TokenizedEmbeddingReqInput]]:
    """The messages of choices; these get their ids on the wire.

    Args:
        choices: from `plan_embeddings`.
        options: of all of them.
        rank: named by the client, -1 for none.
        mint: makes an id.
    """
    received_at = time.time()
    for choice in choices:
        choice.rid = rid = mint()
        body = TokenizedEmbeddingReqInput(
            rid,
            pack_ids(choice.prompt.ids),
            dimensions=options.dimensions,
            data_parallel_rank=rank if rank >= 0 else None,
            priority=options.priority,
            received_at=received_at,
        )
        yield choice, Envelope(Kind.EMBEDDING, rid, rank=rank, tokens=choice.prompt_tokens, exts=[]), body


def vectors_of(batch: BatchEmbeddingOutput) -> list[bytes]:
    """The vector of each row as little-endian f32, empty where there is none that can be read."""
    found = batch.embeddings
    n = len(batch.rids)
    if isinstance(found, Tensor):
        size = len(found.data) // n if n else 0
        whole = found.dtype == "f32" and len(found.shape) == 2 and found.shape[0] == n and size == 4 * found.shape[1]
        return [found.data[i * size : (i + 1) * size] if whole else b"" for i in range(n)]
    rows = found or []
    return [row if len(row) % 4 == 0 else b"" for row in rows] + [b""] * (n - len(rows))
