"""How far each rank has come with its start, and which one is too late."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from servekit.runtime.watchdog import doing, says_of

if TYPE_CHECKING:
    from servekit.runtime.supervisor import Server

LOOK_EVERY_S = 1.0


class LoadingError(RuntimeError):
    """A rank has not loaded in time; the text is one line."""


class Loading:
    """Counts the time that ranks take to load, as long as main itself runs: a machine that stood still was not slow.

    Args:
        timeout_s: how long they may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = self._left_s = timeout_s
        self._looked = time.monotonic()

    def look(self, server: Server) -> None:
        """To be called about every `LOOK_EVERY_S` seconds.

        Raises:
            LoadingError: the time is up, and a rank is not ready.
        """
        now = time.monotonic()
        self._left_s -= min(now - self._looked, 2 * LOOK_EVERY_S)
        self._looked = now
        late = [child for child in server.children if child.rank >= 0 and child.ready_after is None]
        if self._left_s > 0 or not late:
            return
        # All ranks of a group end together: the others wait for the one that has come least far.
        last = min(late, key=lambda child: (child.stood.number, child.stood.share))
        others = f"; {len(late) - 1} more are not ready" if len(late) > 1 else ""
        raise LoadingError(
            f"{last.title} (pid {last.pid}) has not loaded within {self._timeout_s:g} s (--load-timeout): "
            f"it is at {last.stood} ({doing(says_of(server.state_page.snapshot(), last))}){others}"
        )
