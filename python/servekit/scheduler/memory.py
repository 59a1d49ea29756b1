"""The KV pages of a rank: free ones, those of the prefix cache, and those that one request alone uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from servekit.engine.plan import Ints
from servekit.scheduler.pages import PageAllocator
from servekit.scheduler.prefix_cache import Node, PrefixCache, Tokens


@dataclass(slots=True)
class Lease:
    """A request's pages: the first `shared` of its table are the cache's, locked by `node`; the others its own."""

    salt: str
    node: Node
    shared: int


class KvMemory:
    """Gives pages to requests, and gives what they leave behind to those that come later.

    Every page is free, in the cache, or in exactly one request's table as its own.

    Args:
        pages: in the pool.
        page: tokens in a page.
        caches: whether prefixes are kept and shared.

    Attributes:
        allocator, cache: of the pages.
    """

    def __init__(self, pages: int, page: int, caches: bool) -> None:
        self._page = page
        self._caches = caches
        self.allocator = PageAllocator(pages)
        self.cache = PrefixCache(page)

    @property
    def available(self) -> int:
        """Pages that `take` can give: free ones and cached ones that nobody uses."""
        return self.allocator.free + self.cache.evictable

    def take(self, count: int) -> Ints:
        """Take pages.

        Raises:
            RuntimeError: fewer are available; the caller has to look first.
        """
        short = count - self.allocator.free
        if short > 0:
            self.allocator.give(self.cache.evict(short))
        return self.allocator.take(count)

    def admit(self, tokens: Tokens, salt: str, usable: int, reserve: int) -> tuple[Lease, Ints] | None:
        """Pages for a request with all its known tokens, the cached ones of them first.

        Args:
            tokens: its known tokens.
            salt: separates it from others.
            usable: how many of the tokens may come from the cache.
            reserve: pages that must be left.

        Returns:
            Its lease and page table, or None if pages are short.
        """
        node, cached = self._find(tokens, salt, usable)
        self.cache.lock(node)
        new = -(-len(tokens) // self._page) - len(cached)
        if self.available < new + reserve:
            self.cache.unlock(node)
            return None
        return Lease(salt, node, len(cached)), np.concatenate((cached, self.take(new)))

    def fits(self, tokens: Tokens, salt: str, usable: int, reserve: int) -> bool:
        """Whether `admit` would find pages; takes none."""
        node, cached = self._find(tokens, salt, usable)
        self.cache.lock(node)
        enough = self.available >= -(-len(tokens) // self._page) - len(cached) + reserve
        self.cache.unlock(node)
        return enough

    def publish(self, lease: Lease, tokens: Tokens, table: Ints, computed: int, planned: int) -> None:
        """Let others use a request's pages that are full.

        Args:
            tokens: its known tokens.
            table: its page numbers in order. Changed where the cache has the same tokens in another page: that one is
                used from now on, and the request's own is free.
            computed: tokens whose keys and values are in the pool.
            planned: tokens for which that is true when the next step reads the pool.
        """
        if not self._caches:
            return
        self._extend(lease, tokens, table, computed // self._page)
        # Where others compute the same in the same step, each writes into a page of its own.
        if not self.cache.has(lease.node, lease.salt, tokens[lease.shared * self._page :]):
            self._extend(lease, tokens, table, planned // self._page)

    def _extend(self, lease: Lease, tokens: Tokens, table: Ints, full: int) -> None:
        if full <= lease.shared:
            return
        own = table[lease.shared : full].copy()
        new = tokens[lease.shared * self._page : full * self._page]
        node, owned = self.cache.extend(lease.node, lease.salt, new, own)
        table[lease.shared : full] = owned
        self.allocator.give(own[own != owned])
        self.cache.lock(node)
        self.cache.unlock(lease.node)
        lease.node, lease.shared = node, full

    def release(self, lease: Lease, tokens: Tokens, table: Ints, computed: int) -> None:
        """Take back a request's pages; the full ones of them stay in the cache until they are needed."""
        if self._caches:
            self._extend(lease, tokens, table, computed // self._page)
        self.allocator.give(table[lease.shared :])
        self.cache.unlock(lease.node)

    def flush(self) -> None:
        """Forget every cached prefix that nobody uses."""
        self.allocator.give(self.cache.evict(self.cache.evictable))

    def _find(self, tokens: Tokens, salt: str, usable: int) -> tuple[Node, Ints]:
        if not self._caches:
            return self.cache.root, self.cache.root.pages
        return self.cache.match(salt, tokens[: usable // self._page * self._page])
