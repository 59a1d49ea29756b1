"""A runner that behaves like a device of its own: what is launched is computed later, and read later still."""

from __future__ import annotations

import copy
import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from servekit.engine.logprobs import read_logprobs, read_prompt_logprobs
from servekit.engine.plan import Ints, Plan, StepResult
from servekit.engine.sampler import Sampler


class LateDevice:
    """Computes no step before somebody waits for it, and then all that were launched before, in order.

    Tokens that a plan carries over are known here alone. Nobody may change a plan that was launched.

    Args:
        compute: makes a step's result of a plan whose ids are all known.
        ahead: see `ModelRunner`.
        look: called when a step is launched.
    """

    def __init__(self, compute: Callable[[Plan], StepResult], ahead: int, look: Callable[[], None]) -> None:
        self.info: dict[str, Any] = {"device": "late"}
        self.ahead = ahead
        self.most = 0
        self._compute, self._look = compute, look
        self._queue: deque[tuple[Plan, Plan]] = deque()
        self._results: dict[int, StepResult] = {}
        self._drawn: Ints = np.zeros(0, np.int64)

    def launch(self, plan: Plan) -> int:
        self._queue.append((plan, copy.deepcopy(plan)))
        self.most = max(self.most, len(self._queue))
        self._look()
        return plan.step

    def collect(self, handle: int) -> StepResult:
        while handle not in self._results:
            plan, before = self._queue.popleft()
            for field in fields(Plan):
                now, then = getattr(plan, field.name), getattr(before, field.name)
                assert not isinstance(now, np.ndarray) or np.array_equal(now, then), f"{field.name} has changed"
            if plan.carried is not None:
                ids, (at, drawn_at) = plan.ids.copy(), plan.carried
                assert not ids[at].any()
                ids[at] = self._drawn[drawn_at]
                plan = replace(plan, ids=ids, carried=None)
            result = self._results[plan.step] = self._compute(plan)
            self._drawn = result.tokens[plan.sampled, 0]
        return self._results.pop(handle)


class HashModel:
    """A model whose logits are a function of every token that it reads in its pool; the sampler is the real one.

    Args:
        pages, page: sizes of the pool, which holds tokens in place of keys and values.
        vocabulary: how many tokens there are.
    """

    def __init__(self, pages: int, page: int, vocabulary: int) -> None:
        self._pool = np.full((pages + 1, page), -1, np.int64)
        self._vocabulary = vocabulary
        self._sampler = Sampler(vocabulary, torch.device("cpu"))

    def __call__(self, plan: Plan) -> StepResult:
        rows = np.repeat(np.arange(len(plan.counts)), plan.counts)
        firsts = np.cumsum(plan.counts) - plan.counts
        positions = plan.starts[rows] + np.arange(len(rows)) - firsts[rows]
        page = self._pool.shape[1]
        self._pool[plan.tables[rows, positions // page], positions % page] = plan.ids

        def logits(tokens: torch.Tensor) -> torch.Tensor:
            return torch.stack([self._logits(plan, rows[i], positions[i]) for i in tokens.flatten().tolist()])

        out = np.full((len(plan.counts), 1), -1, np.int64)
        found = prompts = None
        if len(plan.sampled):
            made = logits(torch.from_numpy(firsts + plan.counts - 1)[plan.sampled])
            tokens = self._sampler.sample(made.clone(), plan.sampling)
            out[plan.sampled, 0] = tokens.numpy()
            if plan.logprobs is not None:
                at = torch.from_numpy(plan.logprobs.at)
                found = read_logprobs(made[at], tokens[at], plan.logprobs).fetch()
        if plan.prompt_logprobs is not None:
            every = torch.arange(len(rows))[:, None]
            prompts = read_prompt_logprobs(logits, every, plan.prompt_logprobs).fetch()
        return StepResult(out, found, prompts)

    def _logits(self, plan: Plan, row: int, position: int) -> torch.Tensor:
        page = self._pool.shape[1]
        read = self._pool[plan.tables[row, : position // page + 1]].reshape(-1)[: position + 1]
        assert (read >= 0).all(), "a token that nobody has stored"
        seed = int.from_bytes(hashlib.blake2b(read.tobytes(), digest_size=8).digest())
        return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, self._vocabulary).astype(np.float32))
