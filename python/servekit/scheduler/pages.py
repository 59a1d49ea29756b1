"""Which KV pages are free. The pages themselves are the model runner's."""

from __future__ import annotations

import numpy as np

from servekit.engine.plan import Ints


class PageAllocator:
    """Hands out page numbers 1..count; page 0 pads the tables and is never handed out.

    Every page is either free or held: giving back a page that is not held is an error, so none can be owned twice.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # A stack: pages that were used last are still in the processor's caches.
        self._stack = np.arange(count, 0, -1, dtype=np.int64)
        self._held = np.zeros(count + 1, dtype=np.bool_)
        self.free = count

    def take(self, count: int) -> Ints:
        """Take pages.

        Raises:
            RuntimeError: fewer are free; the caller has to look first.
        """
        if count > self.free:
            raise RuntimeError(f"{count} pages asked for, {self.free} are free")
        self.free -= count
        pages = self._stack[self.free : self.free + count].copy()
        self._held[pages] = True
        return pages

    def give(self, pages: Ints) -> None:
        """Give pages back.

        Raises:
            RuntimeError: one of them is not held, or is named twice.
        """
        if not len(pages):
            return
        if not self._held[pages].all():
            raise RuntimeError(f"pages {pages[~self._held[pages]].tolist()} are given back but not held")
        if len(np.unique(pages)) != len(pages):
            raise RuntimeError("a page is given back twice")
        self._held[pages] = False
        self._stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)
