"""Sixteen answers at once.

    python examples/many_streams.py [http://127.0.0.1:8000]

Start the server with `--data-parallel-size 2 --tokenizer-workers 2`: they spread over both.
"""

import asyncio
import sys
import time

from openai import AsyncOpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


async def ask(client: AsyncOpenAI, model: str, number: int) -> str:
    started = time.perf_counter()
    first = None
    pieces = 0
    # Servekit's own fields go into extra_body: this one lets the model talk on after its end token.
    stream = await client.completions.create(
        model=model,
        prompt=f"A short story about the number {number}:",
        max_tokens=24,
        seed=number,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].text:
            pieces += 1
            first = first or time.perf_counter() - started
    assert usage is not None
    took = time.perf_counter() - started
    return (
        f"{number:2}: {usage.completion_tokens} tokens in {pieces} pieces, first after {first:.3f} s, all {took:.3f} s"
    )


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        for line in await asyncio.gather(*(ask(client, model, number) for number in range(16))):
            print(line)


asyncio.run(main())
