"""Bodies of what travels back: one message a step, with per-request data as columns of n rows.

Absent columns are null. `columns.py` says of each column how it is split by row; token ids are little-endian u32,
logprobs little-endian f32, one `bytes` a row.

Logprobs are of the logits as the model made them; `_val` and `_idx` columns have the same shape. `input_` columns tell
of the prompt from `logprob_start_len` on and come once, in the row with the first token; `output_` columns have one
item for each id of the row. `token_logprobs` is one `bytes` a row, with NaN for the first token of a prompt.
`top_logprobs` (likeliest first) and `token_ids_logprobs` are one list a row with one `bytes` a token, empty for that
first token.
"""

from __future__ import annotations

from typing import Any

import msgspec

QUEUE_TIME = "queue_s"
"""Key of `time_stats`: seconds that a request waited at its rank before its first step, in its first and last row."""


class FinishReason(msgspec.Struct, array_like=True, frozen=True):
    """Why a request ended.

    Attributes:
        type: stop, length, abort or error.
        matched: the stop string or token id that ended it, if one did.
        message: one line for the client, for errors and aborts.
        status: HTTP status that fits an error, 0 otherwise.
    """

    type: str
    matched: int | str | None = None
    message: str | None = None
    status: int = 0


class Tensor(msgspec.Struct):
    """A dense array: dtype name (f32, f16, bf16, i64), shape, little-endian bytes in C order."""

    dtype: str
    shape: list[int]
    data: bytes


class LoadReport(msgspec.Struct, array_like=True):
    """A rank's load inside a body, for users of the library; servekit itself uses the envelope's."""

    running: int = 0
    waiting: int = 0
    held_tokens: int = 0
    pending_tokens: int = 0
    pool_tokens: int = 0


class BatchTokenIDOutput(msgspec.Struct, array_like=True, tag=True):
    """One step of a scheduler, for the detokenizer. `decode_ids` are this step's new ids, 0 to k a row.

    `completion_tokens` counts all generated tokens of the request so far, this step's included.
    """

    rids: list[int]
    http_worker_ipcs: list[str] | None = None
    finished_reasons: list[FinishReason | None] | None = None
    prompt_tokens: list[int] | None = None
    completion_tokens: list[int] | None = None
    cached_tokens: list[int] | None = None
    retraction_counts: list[int] | None = None
    dp_ranks: list[int] | None = None
    decode_ids: list[bytes] | None = None
    output_ids: list[bytes] | None = None
    decoded_texts: list[str] | None = None
    read_offsets: list[int] | None = None
    skip_special_tokens: list[bool] | None = None
    spaces_between_special_tokens: list[bool] | None = None
    no_stop_trim: list[bool] | None = None
    spec_verify_ct: list[int] | None = None
    spec_accepted_tokens: list[int] | None = None
    input_token_logprobs_val: list[bytes | None] | None = None
    input_token_logprobs_idx: list[bytes | None] | None = None
    output_token_logprobs_val: list[bytes | None] | None = None
    output_token_logprobs_idx: list[bytes | None] | None = None
    input_top_logprobs_val: list[list[bytes] | None] | None = None
    input_top_logprobs_idx: list[list[bytes] | None] | None = None
    output_top_logprobs_val: list[list[bytes] | None] | None = None
    output_top_logprobs_idx: list[list[bytes] | None] | None = None
    input_token_ids_logprobs_val: list[list[bytes] | None] | None = None
    input_token_ids_logprobs_idx: list[list[bytes] | None] | None = None
    output_token_ids_logprobs_val: list[list[bytes] | None] | None = None
    output_token_ids_logprobs_idx: list[list[bytes] | None] | None = None
    output_hidden_states: list[list[Tensor]] | None = None
    customized_info: dict[str, list[Any]] | None = None
    time_stats: dict[str, list[Any]] | None = None
    load: LoadReport | None = None


class BatchStrOutput(msgspec.Struct, array_like=True, tag=True):
    """What the detokenizer made of a step, for one worker. `output_strs` are the new pieces of text."""

    rids: list[int]
    http_worker_ipcs: list[str] | None = None
    finished_reasons: list[FinishReason | None] | None = None
    prompt_tokens: list[int] | None = None
    completion_tokens: list[int] | None = None
    cached_tokens: list[int] | None = None
    retraction_counts: list[int] | None = None
    dp_ranks: list[int] | None = None
    output_strs: list[str] | None = None
    output_ids: list[bytes] | None = None
    spec_verify_ct: list[int] | None = None
    spec_accepted_tokens: list[int] | None = None
    input_token_logprobs_val: list[bytes | None] | None = None
    input_token_logprobs_idx: list[bytes | None] | None = None
    output_token_logprobs_val: list[bytes | None] | None = None
    output_token_logprobs_idx: list[bytes | None] | None = None
    input_top_logprobs_val: list[list[bytes] | None] | None = None
    input_top_logprobs_idx: list[list[bytes] | None] | None = None
    output_top_logprobs_val: list[list[bytes] | None] | None = None
    output_top_logprobs_idx: list[list[bytes] | None] | None = None
    input_token_ids_logprobs_val: list[list[bytes] | None] | None = None
    input_token_ids_logprobs_idx: list[list[bytes] | None] | None = None
    output_token_ids_logprobs_val: list[list[bytes] | None] | None = None
    output_token_ids_logprobs_idx: list[list[bytes] | None] | None = None
    output_hidden_states: list[list[Tensor]] | None = None
    customized_info: dict[str, list[Any]] | None = None
    time_stats: dict[str, list[Any]] | None = None


class BatchEmbeddingOutput(msgspec.Struct, array_like=True, tag=True):
    """Embeddings of finished requests: a list of f32 vectors, or one stacked array n x d."""

    rids: list[int]
    http_worker_ipcs: list[str] | None = None
    finished_reasons: list[FinishReason | None] | None = None
    prompt_tokens: list[int] | None = None
    completion_tokens: list[int] | None = None
    cached_tokens: list[int] | None = None
    retraction_counts: list[int] | None = None
    dp_ranks: list[int] | None = None
    embeddings: list[bytes] | Tensor | None = None
    pooled_hidden_states: Tensor | None = None
    customized_info: dict[str, list[Any]] | None = None
    time_stats: dict[str, list[Any]] | None = None
