"""What the routes answer, as the OpenAPI document describes it. The routes write these answers themselves.

A member that is `UNSET` by default is there only when it was asked for, or has something to say.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from servekit.http.shapes import Usage

FinishReason = Literal["stop", "length"]


class Ending(msgspec.Struct, kw_only=True):
    """How a choice ended: by its limit, or by an end token or a stop, which `stop_reason` names if the client set it.

    Attributes:
        dp_rank: which rank made it.
        token_ids: the new tokens.
    """

    finish_reason: FinishReason
    stop_reason: int | str | None
    dp_rank: int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """A token that might have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A new token; `bytes` may be a part of a character."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Logprobs of the new tokens, the end token included."""

    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(msgspec.Struct):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Ending, kw_only=True):
    """One answer to the conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    """Lists with an entry for each token; the first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Ending, kw_only=True):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """Answers to prompts, prompt by prompt."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Embedding(msgspec.Struct):
    """A vector of length 1: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """Vectors in the order of their inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


IdLogprob = tuple[float | None, int, str | None]
"""Logprob, id, and text if it was asked for."""


class GeneratedEnd(msgspec.Struct):
    """Why a choice ended; `length` or `matched` says at what."""

    type: FinishReason
    length: int | UnsetType = UNSET
    matched: int | str | UnsetType | None = UNSET


class GeneratedMeta(msgspec.Struct):
    """All about a choice but its text."""

    id: str
    finish_reason: GeneratedEnd
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    dp_rank: int | None
    e2e_latency: float
    input_token_logprobs: list[IdLogprob] | UnsetType = UNSET
    output_token_logprobs: list[IdLogprob] | UnsetType = UNSET
    input_top_logprobs: list[list[IdLogprob] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[IdLogprob] | None] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[IdLogprob] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[IdLogprob] | None] | UnsetType = UNSET


class Generated(msgspec.Struct):
    """One choice of `/generate`."""

    text: str
    output_ids: list[int]
    meta_info: GeneratedMeta


class TokenList(msgspec.Struct):
    """Ids of a text, how many, and how many fit the context."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizedText(msgspec.Struct):
    """Text of ids."""

    prompt: str


class ModelCard(msgspec.Struct):
    """The served model; `max_model_len` is its context in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(msgspec.Struct):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[ModelCard]
