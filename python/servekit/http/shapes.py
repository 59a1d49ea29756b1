"""What the OpenAI routes that generate have in common in their answers: heads, usage, ends."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from servekit.http.sse import json_value
from servekit.tokenizer.options import GenerationOptions
from servekit.tokenizer.state import Choice, Job


class TokenDetails(msgspec.Struct):
    """Prompt tokens that came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of all prompts, each counted once, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


def usage_of(choices: Sequence[Choice]) -> Usage:
    """Usage of a request's choices so far."""
    prompts = {id(choice.prompt): choice for choice in choices}.values()
    prompt_tokens = sum(choice.prompt_tokens for choice in prompts)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    cached = sum(choice.cached_tokens for choice in prompts)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, TokenDetails(cached))


class Shape(Protocol):
    """How a route writes one answer."""

    @property
    def names(self) -> Sequence[str]:
        """Ids under which the client knows it."""

    def whole(self, job: Job) -> bytes:
        """The answer to a request that is not streamed."""

    def chunks(self, choice: Choice) -> list[bytes]:
        """Events for what a choice has new, its end included."""

    def template(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """What stands around the JSON string of the text in the events of a choice that has begun, to its end.

        None if they differ in more than their text, or the choice has not begun: then each is made by `chunks`.
        """

    def usage(self, job: Job) -> bytes:
        """The event with the usage at the end of a stream; nothing if the client did not ask for it."""


class Head:
    """The members that an answer and all its chunks share.

    Args:
        prefix: of the answer's id.
        kind: the `object` member.
        options: say which usage the client wants in a stream.

    Attributes:
        id: of the answer.
    """

    def __init__(self, prefix: str, kind: str, model: str, options: GenerationOptions) -> None:
        self.id = f"{prefix}-{os.urandom(12).hex()}"
        self._members = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        stream = options.stream_options
        self._include = stream is not None and bool(stream.include_usage)
        self._continuous = stream is not None and bool(stream.continuous_usage_stats)
        self._open = b"data: " + json_value(self._members)[:-1] + b',"choices":['
        # A client that asks for the usage at the end finds null in the chunks before.
        self._close = b'],"usage":null}\n\n' if self._include else b"]}\n\n"

    def chunk(self, choice: bytes, source: Choice) -> bytes:
        """The event around one choice's JSON."""
        if self._continuous:
            return self._open + choice + b'],"usage":' + json_value(usage_of([source])) + b"}\n\n"
        return self._open + choice + self._close

    def template(self, before: bytes, after: bytes) -> tuple[bytes, bytes] | None:
        """See `Shape.template`: `chunk` with a choice's JSON in two parts."""
        return None if self._continuous else (self._open + before, after + self._close)

    def usage(self, job: Job) -> bytes:
        """See `Shape.usage`."""
        if not self._include:
            return b""
        return self._open + b'],"usage":' + json_value(usage_of(job.choices)) + b"}\n\n"

    def whole(self, choices: list[dict[str, Any]], job: Job, **more: Any) -> bytes:
        """The answer that is not streamed; `more` are further members."""
        return json_value({**self._members, "choices": choices, "usage": usage_of(job.choices), **more})


def ending(choice: Choice) -> dict[str, Any]:
    """Members that say how a choice ended and which rank ran it."""
    finish = choice.finish
    if finish is None:
        return {"finish_reason": None}
    members = {"finish_reason": finish.type, "stop_reason": finish.matched}
    if choice.dp_rank >= 0:
        members["dp_rank"] = choice.dp_rank
    return members


def ended(choice: Choice) -> bool:
    """The choice came to an end that is no error."""
    return choice.finish is not None and choice.finish.type not in ("error", "abort")
