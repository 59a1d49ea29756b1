"""Decides which texts are embedded together: first come first served, as many tokens as a step may have.

It has the face of `Scheduler`, so one loop drives both. A text is computed whole in one step and then leaves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from servekit.engine.embedding_plan import EmbeddingPlan
from servekit.engine.plan import Floats, Ints
from servekit.messages.batches import BatchEmbeddingOutput, FinishReason
from servekit.messages.envelope import Load
from servekit.messages.requests import TokenizedEmbeddingReqInput
from servekit.scheduler.request import RequestError, read_ids


@dataclass(slots=True, frozen=True)
class EmbeddingConfig:
    """Sizes of an embedding scheduler.

    Attributes:
        max_running: most texts in a step.
        max_waiting: most texts that wait.
        max_prefill_tokens: most tokens in a step; a longer text is computed alone.
        max_model_len: most tokens of a text.
        vocab_size: ids are below it.
        size: numbers in a vector.
        normalized: vectors have length 1, also when a request asks for fewer dimensions.
    """

    max_running: int
    max_waiting: int
    max_prefill_tokens: int
    max_model_len: int
    vocab_size: int
    size: int
    normalized: bool


@dataclass(slots=True, frozen=True)
class EmbeddingStep:
    """A plan, and whose texts its rows are."""

    plan: EmbeddingPlan
    rids: list[int]


@dataclass(slots=True)
class _Text:
    tokens: Ints
    dimensions: int


class EmbeddingScheduler:
    """Texts of one rank from acceptance to their single row.

    Attributes:
        config: its sizes.
        pool_tokens: most tokens that it takes at once.
        max_tokens: most tokens of one text.
    """

    def __init__(self, config: EmbeddingConfig) -> None:
        self.config = config
        self.max_tokens = config.max_model_len
        self.pool_tokens = config.max_running * config.max_model_len
        self._texts: dict[int, _Text] = {}
        self._waiting: deque[int] = deque()
        self._waiting_tokens = self._running_tokens = 0
        self._steps = 0
        self._clear()

    def _clear(self) -> None:
        self._rids: list[int] = []
        self._reasons: list[FinishReason | None] = []
        self._prompt: list[int] = []
        self._vectors: list[bytes] = []

    def add(self, rid: int, body: Any) -> bool:
        """Accept a text, or refuse it with an error row.

        Returns:
            False if a text of this id lives already: nothing is done.
        """
        if rid in self._texts:
            return False
        try:
            text = self._check(body)
        except RequestError as error:
            self._end(rid, FinishReason("error", message=str(error), status=error.status))
            return True
        self._texts[rid] = text
        self._waiting.append(rid)
        self._waiting_tokens += len(text.tokens)
        return True

    def abort(self, rid: int, reason: str = "") -> None:
        """End a text, in whatever phase. An unknown id means nothing."""
        if rid in self._texts:
            self._close(rid, FinishReason("abort", message=reason or None))

    def flush_cache(self) -> bool:
        """Nothing is cached here."""
        return True

    def close_all(self, message: str, status: int) -> None:
        """End every text with an error."""
        for rid in list(self._texts):
            self._close(rid, FinishReason("error", message=message, status=status))

    def plan(self) -> EmbeddingStep | None:
        """The next step, or None if nothing waits."""
        rids: list[int] = []
        left = self.config.max_prefill_tokens
        while self._waiting and len(rids) < self.config.max_running:
            count = len(self._texts[self._waiting[0]].tokens)
            if rids and count > left:
                break
            left -= count
            rids.append(self._waiting.popleft())
        if not rids:
            return None
        tokens = [self._texts[rid].tokens for rid in rids]
        counts = np.array([len(each) for each in tokens], np.int64)
        self._waiting_tokens -= int(counts.sum())
        self._running_tokens = int(counts.sum())
        self._steps += 1
        return EmbeddingStep(EmbeddingPlan(self._steps, np.concatenate(tokens), counts), rids)

    def complete(self, step: EmbeddingStep, vectors: Floats) -> None:
        """Take in a step's vectors, [texts, size]. Texts that ended since the step was planned are passed over."""
        self._running_tokens = 0
        finite = np.isfinite(vectors.astype(np.float64).sum(-1)).tolist()
        for rid, vector, good in zip(step.rids, vectors, finite, strict=True):
            text = self._texts.pop(rid, None)
            if text is None:
                continue
            if not good:
                why = "the model's output for this text is not finite"
                self._end(rid, FinishReason("error", message=why, status=500), len(text.tokens))
                continue
            vector = vector[: text.dimensions]
            if self.config.normalized and text.dimensions < self.config.size:
                vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
            self._end(rid, FinishReason("stop"), len(text.tokens), vector.astype("<f4").tobytes())

    def take_batch(self) -> BatchEmbeddingOutput | None:
        """Rows made since the last call, or None."""
        if not self._rids:
            return None
        batch = BatchEmbeddingOutput(
            rids=self._rids,
            finished_reasons=self._reasons,
            prompt_tokens=self._prompt,
            completion_tokens=[0] * len(self._rids),
            embeddings=self._vectors,
        )
        self._clear()
        return batch

    def load(self) -> Load:
        """The load now."""
        return Load(
            running=len(self._texts) - len(self._waiting),
            waiting=len(self._waiting),
            pending_tokens=self._waiting_tokens + self._running_tokens,
            pool_tokens=self.pool_tokens,
        )

    def state(self) -> dict[str, Any]:
        """Plain values for `/debug/state`."""
        return {
            "live": len(self._texts),
            "running": len(self._texts) - len(self._waiting),
            "waiting": len(self._waiting),
            "pool_tokens": self.pool_tokens,
            "steps": self._steps,
        }

    def _check(self, body: Any) -> _Text:
        if not isinstance(body, TokenizedEmbeddingReqInput):
            raise RequestError("this model makes embeddings, it generates no text")
        if len(self._waiting) >= self.config.max_waiting:
            raise RequestError(f"{len(self._waiting)} requests wait already", 503)
        tokens = read_ids(body.input_ids, self.config.vocab_size, "the text")
        if not len(tokens):
            raise RequestError("the text is empty")
        if len(tokens) > self.max_tokens:
            raise RequestError(f"the text has {len(tokens)} tokens, at most {self.max_tokens} fit")
        dimensions = self.config.size if body.dimensions is None else body.dimensions
        if not 1 <= dimensions <= self.config.size:
            raise RequestError(f"dimensions must be from 1 to {self.config.size}")
        return _Text(tokens, dimensions)

    def _close(self, rid: int, reason: FinishReason) -> None:
        text = self._texts.pop(rid)
        if rid in self._waiting:
            self._waiting.remove(rid)
            self._waiting_tokens -= len(text.tokens)
        self._end(rid, reason, len(text.tokens))

    def _end(self, rid: int, reason: FinishReason, tokens: int = 0, vector: bytes = b"") -> None:
        self._rids.append(rid)
        self._reasons.append(reason)
        self._prompt.append(tokens)
        self._vectors.append(vector)
