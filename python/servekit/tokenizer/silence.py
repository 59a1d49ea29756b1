"""How long the control process has been silent, for a worker that may have stood still itself."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from servekit._core import StatePage

TICK_S = 1.0
_LATE_S = 2.0
"""A tick that is this late was late because nobody here ran: the machine was suspended, the container frozen."""


class ControlSilence:
    """Counts only the time in which this process ran, for who sleeps hears nobody.

    Args:
        page: the state page.
    """

    def __init__(self, page: StatePage) -> None:
        self._page = page
        self._ticked = time.monotonic()
        self._awake_since = -math.inf

    def tick(self) -> None:
        """To be called every `TICK_S` seconds by whatever would stand still with this process."""
        now = time.monotonic()
        if now - self._ticked > TICK_S + _LATE_S:
            self._awake_since = now
        self._ticked = now

    def seconds(self) -> float:
        """Seconds for which control could have been heard and was not."""
        age = self._page.control_age()
        if age <= TICK_S:
            return age
        now = time.monotonic()
        return 0.0 if now - self._ticked > TICK_S + _LATE_S else min(age, now - self._awake_since)
