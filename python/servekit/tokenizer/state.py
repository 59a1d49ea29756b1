"""Live requests of one worker: a job is what one HTTP request asked for, a choice is one message of it on the wire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from servekit.messages.batches import FinishReason
from servekit.tokenizer.logprobs import Logprobs
from servekit.tokenizer.refusal import ClientGone, Refusal

MAX_UNREAD = 4 << 20
"""Most characters of one stream that wait for its client; beyond it the client is too slow and is cut off."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request. `text` is what to echo, if the client asked for an echo."""

    ids: list[int]
    text: str = ""


class Choice:
    """One answer as it comes: pieces that nobody has taken yet are merged.

    Attributes:
        rid: id on the wire, 0 for a choice that never went there.
        index: place in the response.
        prompt: what it answers.
        prompt_tokens, completion_tokens, cached_tokens: as last reported.
        dp_rank: rank that runs it, -1 unknown.
        finish: why it ended, None while it lives.
        changed: its job has it on the list of those with news.
        logprobs: what came of them, None if the client wants none.
        prompt_only: a token is made for the prompt's logprobs alone, and is not for the client.
        vector: what became of a prompt to embed, as little-endian f32.
        direct: its text goes to its client past this object.
        piece_at: when its last row came, in seconds of the monotonic clock; 0 before the first.
    """

    __slots__ = (
        "_ids",
        "_texts",
        "cached_tokens",
        "changed",
        "completion_tokens",
        "direct",
        "dp_rank",
        "finish",
        "index",
        "logprobs",
        "piece_at",
        "prompt",
        "prompt_only",
        "prompt_tokens",
        "rid",
        "vector",
    )

    def __init__(self, index: int, prompt: Prompt) -> None:
        self.rid = 0
        self.index = index
        self.prompt = prompt
        self.prompt_tokens = len(prompt.ids)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.dp_rank = -1
        self.finish: FinishReason | None = None
        self.changed = False
        self.logprobs: Logprobs | None = None
        self.prompt_only = False
        self.vector = b""
        self.direct = False
        self.piece_at = 0.0
        self._texts: list[str] = []
        self._ids: list[bytes] = []

    def put(self, text: str, ids: bytes) -> None:
        """Append a piece."""
        if text:
            self._texts.append(text)
        if ids:
            self._ids.append(ids)

    def take(self) -> tuple[str, bytes]:
        """Everything since the last call: text, and ids as packed u32."""
        if not self._texts and not self._ids:
            return "", b""
        text, ids = "".join(self._texts), b"".join(self._ids)
        self._texts.clear()
        self._ids.clear()
        return text, ids


class Job:
    """The choices of one HTTP request, and the one coroutine that waits for them.

    Attributes:
        choices: in response order.
        live: choices that have not ended.
        streamed: its client gets pieces as they come; otherwise they wait here for the end.
        gone: its client went away.
        closed: it holds nothing any more.
        reserved_tokens, reserved_requests: what was reserved for it on the state page.
        cut: closes its client's connection at once, unread bytes and all.
        began: when it was admitted, in seconds of the monotonic clock.
        names: ids under which its client knows the answer.
    """

    def __init__(self, choices: Sequence[Choice] = (), reserved_tokens: int = 0, reserved_requests: int = 0) -> None:
        self.choices = list(choices)
        self.live = len(self.choices)
        self.streamed = False
        self.gone = False
        self.closed = False
        self.reserved_tokens = reserved_tokens
        self.reserved_requests = reserved_requests
        self.cut: Callable[[], None] | None = None
        self.began = time.monotonic()
        self.names: Sequence[str] = ()
        self._changed: list[Choice] = []
        self._unread = 0
        self._failure: Refusal | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, choice: Choice, text: str, ids: bytes, finish: FinishReason | None) -> bool:
        """Take in a row; False if its client is so slow that the job has to be dropped."""
        choice.put(text, ids)
        self._unread += len(text)
        if finish is not None:
            choice.finish = finish
            self.live -= 1
            if finish.type in ("error", "abort"):
                self.fail(_failure_of(finish))
        if not choice.changed:
            choice.changed = True
            self._changed.append(choice)
        self._wake()
        return not self.streamed or self._unread <= MAX_UNREAD

    def fail(self, refusal: Refusal) -> None:
        """End the whole job with an error, unless one ended it before."""
        self._failure = self._failure or refusal
        self._wake()

    def leave(self) -> None:
        """The client is gone: whoever waits gets `ClientGone`."""
        self.gone = True
        self._wake()

    def cut_off(self) -> None:
        """Drop a client that does not read: whoever writes to it is blocked until its connection is closed."""
        self.leave()
        if self.cut is not None:
            self.cut()

    async def changed(self) -> list[Choice]:
        """Wait until choices have news and say which.

        Raises:
            Refusal: the job ended with an error; pieces before it have been handed out.
            ClientGone: the client closed its connection.
        """
        while True:
            if self.gone:
                raise ClientGone
            if self._changed:
                changed, self._changed = self._changed, []
                for choice in changed:
                    choice.changed = False
                self._unread = 0
                return changed
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def finished(self) -> None:
        """Wait until every choice has ended; pieces stay in the choices.

        Raises:
            Refusal, ClientGone: as for `changed`.
        """
        while self.live:
            await self.changed()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what ended the job, if it was no ordinary end.

        Raises:
            Refusal, ClientGone: as for `changed`.
        """
        if self.gone:
            raise ClientGone
        if self._failure is not None:
            raise self._failure

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _failure_of(finish: FinishReason) -> Refusal:
    if finish.type == "abort":
        return Refusal(finish.status or 500, finish.message or "the request was aborted", code="aborted")
    status = finish.status if 400 <= finish.status < 600 else 500
    return Refusal(status, finish.message or "the request failed", retry_after=1 if status == 503 else None)
