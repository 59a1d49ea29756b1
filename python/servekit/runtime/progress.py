"""How far a long start has come: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from typing import Any

logger = logging.getLogger("servekit.runtime")

LINE_EVERY_S = 2.0


class Progress:
    """Shows `done` of `total` per title; the bars vanish when they are full."""

    def __init__(self) -> None:
        self._bars: dict[str, Any] = {}
        self._last_line: dict[str, float] = {}

    def show(self, title: str, done: float, total: float, what: str) -> None:
        """Take a report; `title` and `what` name the thing that moves."""
        key = f"{title} {what}"
        if sys.stderr.isatty():
            self._bar(key, done, total)
        elif done >= total or time.monotonic() - self._last_line.get(key, 0.0) >= LINE_EVERY_S:
            self._last_line[key] = time.monotonic()
            logger.info("%s: %.0f %%", key, 100 * done / max(total, 1e-9))

    def _bar(self, key: str, done: float, total: float) -> None:
        from tqdm import tqdm

        bar = self._bars.get(key)
        if bar is None:
            form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed} < {remaining}"
            size = shutil.get_terminal_size()
            bar = tqdm(
                total=total,
                desc=key,
                position=len(self._bars),
                leave=False,
                bar_format=form,
                file=sys.stderr,
                # A terminal that tells no size, as some containers' do, would get no bar.
                ncols=min(100, size.columns),
                nrows=size.lines,
            )
            self._bars[key] = bar
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    def close(self) -> None:
        """Remove what is left of the bars."""
        for bar in self._bars.values():
            bar.close()
        self._bars.clear()


class Stood:
    """Where a rank stands in its start.

    Attributes:
        number: stages that it has begun.
        share: of the present one, from 0 to 1.
    """

    def __init__(self) -> None:
        self.number, self.share = 0, 0.0
        self._what = "its first imports"

    def take(self, what: str, share: float = 0.0) -> None:
        """Take in how far a child said that it is, and with what."""
        if what != self._what:
            self.number, self._what = self.number + 1, what
        self.share = share

    def __str__(self) -> str:
        """In words, such as `weights, 40 %`."""
        return f"{self._what}, {100 * self.share:.0f} %" if self.share else self._what
