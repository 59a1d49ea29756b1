"""Who begins when: the text of running requests goes before a burst of new ones."""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 16
"""Requests that begin within one turn of the loop: some three milliseconds of rendering and tokenizing."""


class Turns:
    """Lets a few requests begin in each turn of the event loop; what came from the ranks is written in between.

    Without it a hundred requests that arrive together are tokenized one after the other before anybody gets a token.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def take(self) -> None:
        """Wait for a turn; at once if few have begun in this one. First come, first served."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning, self._left = True, self._at_once
            loop.call_soon(self._next, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._at_once
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            # Whoever was cancelled meanwhile needs none.
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        self._turning = self._left < self._at_once or bool(self._waiting)
        if self._turning:
            loop.call_soon(self._next, loop)
