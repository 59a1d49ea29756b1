"""Which pages hold which tokens: a radix tree over token ids, so that a shared prefix is computed and stored once.

An edge holds whole pages: the tokens of some, and where their keys and values are. What a request uses is locked along
the way to the root; the rest stays until its pages are needed, and leaves then go in the order of their last use.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import numpy.typing as npt

from servekit.engine.plan import Ints

Tokens = npt.NDArray[np.int32]
Key = tuple[str, bytes]
"""Salt, which is empty below the first level, and the tokens of an edge's first page."""


class Node:
    """The tokens and pages between a node's parent and itself.

    Attributes:
        tokens, pages: `page` tokens for each page.
        parent: None for the root and for a node that was evicted.
        key: under which the parent has it.
        refs: requests that use it or something below it.
        used: when it was last used, as a count.
    """

    __slots__ = ("children", "key", "pages", "parent", "refs", "tokens", "used")

    def __init__(self, tokens: Tokens, pages: Ints, parent: Node | None, key: Key, used: int) -> None:
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.key = key
        self.children: dict[Key, Node] = {}
        self.refs = 0
        self.used = used


class PrefixCache:
    """The tree of one rank.

    Attributes:
        root: stands for no tokens; never locked to any effect and never evicted.
        pages: pages in the tree.
        evictable: those of them that nobody uses.
    """

    def __init__(self, page: int) -> None:
        self._page = page
        self._ticks = itertools.count(1)
        self.root = Node(np.zeros(0, np.int32), np.zeros(0, np.int64), None, ("", b""), 0)
        self.pages = self.evictable = self._nodes = 0
        # Leaves that nobody uses, by last use; entries that are no longer true are passed over when they come up.
        self._leaves: list[tuple[int, int, Node]] = []
        self._pushes = itertools.count()

    def match(self, salt: str, tokens: Tokens) -> tuple[Node, Ints]:
        """The longest prefix of whole pages: the node that ends it, and its pages. The caller locks the node."""
        node, pages, at = self.root, [self.root.pages], 0
        while (child := node.children.get(self._key(salt, node, tokens[at:]))) is not None:
            common = common_pages(child.tokens, tokens[at:], self._page)
            if common < len(child.pages):
                child = self._split(child, common)
            pages.append(child.pages)
            at += common * self._page
            node = child
        return node, np.concatenate(pages)

    def matched(self, salt: str, tokens: Tokens) -> int:
        """How many tokens `match` would find; changes nothing."""
        node, at = self.root, 0
        while (child := node.children.get(self._key(salt, node, tokens[at:]))) is not None:
            common = common_pages(child.tokens, tokens[at:], self._page)
            at += common * self._page
            if common < len(child.pages):
                break
            node = child
        return at

    def has(self, node: Node, salt: str, tokens: Tokens) -> bool:
        """Whether the tree has the first page of what follows a node."""
        return self._key(salt, node, tokens) in node.children

    def extend(self, node: Node, salt: str, tokens: Tokens, pages: Ints) -> tuple[Node, Ints]:
        """Add what follows a node.

        Args:
            node: locked by the caller.
            salt: separates the tenants' trees.
            tokens: of whole pages.
            pages: where their keys and values are.

        Returns:
            The node that ends the tokens, for the caller to lock, and the pages under which the tree has them: others
            than the caller's where it had these tokens already, whose own stay the caller's.
        """
        owned, at = [], 0
        while at < len(pages):
            rest = tokens[at * self._page :]
            key = self._key(salt, node, rest)
            child = node.children.get(key)
            if child is None:
                child = Node(rest.copy(), pages[at:].copy(), node, key, next(self._ticks))
                node.children[key] = child
                self.pages += len(child.pages)
                self.evictable += len(child.pages)
                self._nodes += 1
                self._offer(child)
            elif (common := common_pages(child.tokens, rest, self._page)) < len(child.pages):
                child = self._split(child, common)
            owned.append(child.pages)
            at += len(child.pages)
            node = child
        return node, np.concatenate(owned) if owned else pages

    def lock(self, node: Node) -> None:
        """Keep a node and all above it."""
        above: Node | None = node
        while above is not None:
            if above.refs == 0:
                self.evictable -= len(above.pages)
            above.refs += 1
            above = above.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        now = next(self._ticks)
        above: Node | None = node
        while above is not None:
            above.refs -= 1
            above.used = now
            if above.refs == 0:
                self.evictable += len(above.pages)
                self._offer(above)
            above = above.parent

    def evict(self, count: int) -> Ints:
        """Take up to `count` pages out of the tree: ends of leaves that nobody uses, the longest unused first."""
        freed = [np.zeros(0, np.int64)]
        while count > 0 and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if parent is None or node.refs or node.children or node.used != used:
                continue
            taken = min(count, len(node.pages))
            kept = len(node.pages) - taken
            freed.append(node.pages[kept:])
            node.pages, node.tokens = node.pages[:kept], node.tokens[: kept * self._page]
            self.pages -= taken
            self.evictable -= taken
            count -= taken
            if not kept:
                del parent.children[node.key]
                node.parent = None
                self._nodes -= 1
                node = parent
            self._offer(node)
        return np.concatenate(freed)

    def _offer(self, node: Node) -> None:
        """Let a node be evicted, if it is a leaf that nobody uses."""
        if node.refs or node.children or node.parent is None:
            return
        heapq.heappush(self._leaves, (node.used, next(self._pushes), node))
        if len(self._leaves) > 64 + 4 * self._nodes:
            # What was used again left an entry behind each time.
            self._leaves = [e for e in self._leaves if e[2].used == e[0] and not e[2].refs and e[2].parent is not None]
            heapq.heapify(self._leaves)

    def _key(self, salt: str, node: Node, tokens: Tokens) -> Key:
        """Where a node has the child that begins with these tokens; with less than a page of them there is none."""
        return (salt if node is self.root else "", tokens[: self._page].tobytes())

    def _split(self, node: Node, pages: int) -> Node:
        """Put a node with its first pages above it, and return that; locks of the node go through both."""
        parent, cut = node.parent, pages * self._page
        if parent is None:
            raise RuntimeError("a node outside the tree is split")
        above = Node(node.tokens[:cut], node.pages[:pages], parent, node.key, node.used)
        above.refs = node.refs
        parent.children[node.key] = above
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[pages:], above
        node.key = self._key("", above, node.tokens)
        above.children[node.key] = node
        self._nodes += 1
        return above


def common_pages(a: Tokens, b: Tokens, page: int) -> int:
    """How many whole pages at the beginning two token sequences have in common."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0] if len(differs) else n) // page
