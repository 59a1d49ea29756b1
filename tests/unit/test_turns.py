"""Requests that come together begin a few at a time, in their order, and leave room between."""

from __future__ import annotations

import asyncio
import itertools

from servekit.tokenizer.turns import Turns


def test_a_burst_begins_a_few_at_a_time() -> None:
    async def run() -> list[int]:
        turns, begun, seen = Turns(3), [], []

        async def request(number: int) -> None:
            await turns.take()
            begun.append(number)

        tasks = [asyncio.create_task(request(i)) for i in range(20)]
        tasks[7].cancel()
        tasks[12].cancel()
        while not all(task.done() for task in tasks):
            seen.append(len(begun))
            await asyncio.sleep(0)
        assert begun == [i for i in range(20) if i not in (7, 12)]
        return seen

    seen = asyncio.run(run())
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 3


def test_few_do_not_wait() -> None:
    async def run() -> None:
        turns = Turns(2)
        for _ in range(5):
            taken = turns.take()
            try:
                taken.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("it waited")
            for _ in range(3):
                await asyncio.sleep(0)

    asyncio.run(run())


def test_a_request_cancelled_while_it_waits_takes_no_turn() -> None:
    async def run() -> list[str]:
        turns, begun = Turns(1), []

        async def request(name: str) -> None:
            await turns.take()
            begun.append(name)

        first, second, third = (asyncio.create_task(request(name)) for name in "abc")
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait_for(asyncio.gather(first, second, third, return_exceptions=True), 5)
        return begun

    assert asyncio.run(run()) == ["a", "c"]
