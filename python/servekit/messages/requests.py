"""Bodies of what travels from the HTTP workers to the ranks. The names are the field's (SGLang's `io_struct`).

Every struct is positional (`array_like`) and tagged with its name. A new field goes to the tail, with a default:
an older reader ignores it, a newer one finds the default.
"""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """How one request's tokens are chosen and when it ends.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1 (0 is answered by the worker itself).
        min_new_tokens: no end token before that many.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: mass of the nucleus, in (0, 1].
        top_k: most candidates, -1 for all.
        min_p: least probability relative to the likeliest token, in [0, 1].
        seed: together with a token's position it determines the draw; None lets the worker pick one at random.
        stop_token_ids: ids that end the request and are left out of the text, beside the model's end tokens.
        ignore_eos: the model's end tokens do not end the request.
        frequency_penalty, presence_penalty, repetition_penalty: neutral at 0, 0, 1.
        logit_bias: token id to bias.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None


class TokenizedGenerateReqInput(msgspec.Struct, array_like=True, tag=True):
    """One prompt, one choice. `input_ids` is little-endian u32.

    `data_parallel_rank`, `priority`, `bootstrap_room` and `cache_salt` are copies for the scheduler: the envelope
    decides. `received_at` is Unix time in seconds. Stop strings are not here: the detokenizer matches them.

    Attributes:
        return_logprob: send logprobs of the drawn tokens, of the `top_logprobs_num` likeliest and of the ids in
            `token_ids_logprob`.
        logprob_start_len: first token of the prompt whose logprob is wanted too, -1 for none.
        resume_output_ids: little-endian u32: tokens that were generated and sent before; the request goes on behind
            them. On the wire they may also be the message's first attachment, which wins.
    """

    rid: int
    input_ids: bytes
    sampling_params: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    data_parallel_rank: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    lora_id: str | None = None
    session_id: str | None = None
    received_at: float = 0.0
    resume_output_ids: bytes = b""


class TokenizedEmbeddingReqInput(msgspec.Struct, array_like=True, tag=True):
    """One text to embed; `input_ids` is little-endian u32."""

    rid: int
    input_ids: bytes
    dimensions: int | None = None
    data_parallel_rank: int | None = None
    priority: int | None = None
    received_at: float = 0.0


class AbortReq(msgspec.Struct, array_like=True, tag=True):
    """Stop working on a request. An unknown id means nothing."""

    rid: int
    reason: str = ""


class ProfileReq(msgspec.Struct, array_like=True, tag=True):
    """Start or stop a profile that is written to `folder`."""

    start: bool
    folder: str = ""


class FlushCacheReq(msgspec.Struct, array_like=True, tag=True):
    """Drop every cached prefix that no request uses."""


class PauseReq(msgspec.Struct, array_like=True, tag=True):
    """Start no further step until a `ContinueReq`."""


class ContinueReq(msgspec.Struct, array_like=True, tag=True):
    """Go on after a `PauseReq`."""


class SetLogLevelReq(msgspec.Struct, array_like=True, tag=True):
    """Set the log level of every process: debug, info, warning or error."""

    level: str


class GetStateReq(msgspec.Struct, array_like=True, tag=True):
    """Ask each rank for what it holds, as shown by `/debug/state`."""


class ActiveRanksOutput(msgspec.Struct, array_like=True, tag=True):
    """Which ranks take requests: one flag a rank."""

    active: list[bool]


class AbortRequestsReq(msgspec.Struct, array_like=True, tag=True):
    """Have every worker end requests with an error.

    Attributes:
        ids: of responses as clients know them, or of choices as `/debug/state` shows them.
        everything: end all requests instead.
    """

    ids: list[str] = []
    everything: bool = False


class ControlReply(msgspec.Struct, array_like=True, tag=True):
    """Answer to a control message; the envelope's rank says who answers: a rank, -1 for the control process itself,
    `party_of_worker` for a worker.

    Attributes:
        ok: the message was obeyed.
        message: why not, in one line.
        data: JSON of what was asked for, empty if nothing was.
        asked: who will answer, in the control process's own reply: ranks by number, workers by `party_of_worker`.
    """

    ok: bool
    message: str = ""
    data: bytes = b""
    asked: list[int] = []
