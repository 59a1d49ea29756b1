"""The jobs that servers are measured with. Each gives one sample: a figure of one run."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass

from engine.client import ask, prompt, together


@dataclass(frozen=True)
class Target:
    """A server to measure, and the model's name there."""

    port: int
    model: str


def batch(target: Target, rng: random.Random, shared: int = 0) -> float:
    """Output tokens per second of 16 requests of 256 in and 64 out, of which the first `shared` are the same."""
    prefix = prompt(shared, rng)
    prompts = [prompt(256, rng, prefix) for _ in range(16)]
    began = time.perf_counter()
    answers = asyncio.run(together(target.port, target.model, prompts, 64))
    return sum(answer.tokens for answer in answers) / (time.perf_counter() - began)


def decode(target: Target, rng: random.Random, streams: int, tokens: int) -> float:
    """Tokens per second while all of some streams decode, behind prompts of 16 tokens."""
    prompts = [prompt(16, rng) for _ in range(streams)]
    answers = asyncio.run(together(target.port, target.model, prompts, tokens))
    begin = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    # Text of a token that ends within a character comes with the next one: pieces are counted as their share of tokens.
    pieces = sum(sum(begin < at <= end for at in answer.times) for answer in answers)
    share = sum(answer.tokens for answer in answers) / sum(len(answer.times) for answer in answers)
    return pieces * share / (end - begin)


def first_token(target: Target, rng: random.Random, length: int) -> float:
    """Seconds from sending a prompt of so many tokens to an idle server to the first token."""
    answer = asyncio.run(ask(target.port, target.model, prompt(length, rng), 2))
    return answer.times[0] - answer.sent


def gap_ratio(target: Target, rng: random.Random) -> float:
    """How much longer the 99th percentile of 8 streams' gaps gets while a prompt of 4000 tokens comes in."""

    async def measure() -> float:
        streams = [asyncio.create_task(ask(target.port, target.model, prompt(16, rng), 400)) for _ in range(8)]
        await asyncio.sleep(4)
        began = time.perf_counter()
        late = await ask(target.port, target.model, prompt(4000, rng), 1)
        gaps: dict[bool, list[float]] = {True: [], False: []}
        for answer in await asyncio.gather(*streams):
            settled = answer.times[0] + 1
            for before, after in zip(answer.times, answer.times[1:], strict=False):
                if before > settled and not (before < began < after):
                    gaps[began <= before and after <= late.times[0]].append(after - before)
        if len(gaps[True]) < 8:
            raise SystemExit("the streams ended before the long prompt came: nothing to compare")
        return _p99(gaps[True]) / _p99(gaps[False])

    return asyncio.run(measure())


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1] if len(values) > 1 else values[0]
