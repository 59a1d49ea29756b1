"""How long the mock's requests waited for their first step, told in their first row and in their last."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from servekit.messages.batches import QUEUE_TIME


class Waits:
    """Seconds by request, from admission to its last row."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._untold: set[int] = set()

    def admitted(self, rid: int, seconds: float) -> None:
        """A request runs from now on."""
        self._seconds[rid] = seconds
        self._untold.add(rid)

    def column(self, rids: Sequence[int], ends: Collection[int]) -> dict[str, list[float | None]] | None:
        """What a step's `time_stats` are; None if no request begins or ends in it.

        Args:
            rids: of its rows.
            ends: which rows are the last of their requests.
        """
        if not self._untold and not ends:
            return None
        telling = {row for row, rid in enumerate(rids) if rid in self._untold} if self._untold else set()
        column = [self._seconds.get(rid) if row in telling or row in ends else None for row, rid in enumerate(rids)]
        self._untold.difference_update(rids)
        for row in ends:
            self._seconds.pop(rids[row], None)
        return {QUEUE_TIME: column}
