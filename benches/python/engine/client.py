"""Streams completions of token ids from an OpenAI-compatible server and notes when each token came."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

REQUEST_S = 600
_IDS = range(1000, 45000)
"""Ordinary tokens of the demo model's vocabulary."""


@dataclass
class Answer:
    """What a request saw, times in seconds of the performance counter."""

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each piece came; with one token a piece, each token."""
    tokens: int = 0
    """Of the output, as the server counted them."""


def prompt(length: int, rng: random.Random, prefix: Sequence[int] = ()) -> list[int]:
    """Random tokens behind a prefix, `length` in all."""
    return [*prefix, *rng.choices(_IDS, k=length - len(prefix))]


async def ask(port: int, model: str, ids: Sequence[int], max_tokens: int) -> Answer:
    """One greedy completion that goes on to its last token."""
    body = {
        "model": model,
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    answer = Answer(sent=time.perf_counter())
    try:
        writer.write(head.encode() + raw)
        async with asyncio.timeout(REQUEST_S):
            status = await reader.readline()
            if b" 200 " not in status:
                raise SystemExit(f"{status.decode().strip()}: {(await reader.read()).decode(errors='replace')[-300:]}")
            async for line in reader:
                _read(line, answer)
    finally:
        writer.close()
    if not answer.tokens:
        raise SystemExit("a stream ended without saying how many tokens it had")
    return answer


def _read(line: bytes, answer: Answer) -> None:
    if not line.startswith(b"data: {"):
        return
    event = json.loads(line[6:])
    if event.get("error"):
        raise SystemExit(f"the server says {event['error']}")
    if usage := event.get("usage"):
        answer.tokens = usage["completion_tokens"]
    if event.get("choices"):
        answer.times.append(time.perf_counter())


async def together(port: int, model: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
    """All prompts at once."""
    return await asyncio.gather(*(ask(port, model, ids, max_tokens) for ids in prompts))
