"""Attention over the paged KV pool, behind one interface.

A back end is told of a step once (`begin`), then asked for every layer (`attend`). The torch back end works on every
device: it gathers a sequence's pages into a preallocated buffer and calls torch's own kernel. A layer with a sliding
window gathers the window's pages only; pages that no window reaches any more are kept, as other layers and other
requests may need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from servekit.engine.device import upload
from servekit.engine.kv_cache import KvPool
from servekit.engine.plan import Plan
from servekit.models.split import ALL, Part, Span

_GROUP_WASTE = 256
"""Padded tokens that cost about as much as the calls for one more group of rows."""


class Attention(Protocol):
    """Causal attention of a step's new tokens over their own sequences, as a model sees it.

    Attributes:
        mine: which of a step's tokens are attended here, where ranks share a step's sequences; None is all of them.
    """

    mine: slice | None

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Store the new tokens' keys and values, all of them, then attend.

        A row may read what another row of the same step stores: requests share their prefixes while these are made.

        Args:
            q: [tokens, heads, head size].
            kv: [tokens, 2, kv heads, head size].

        Returns:
            [tokens, heads * head size].
        """


class AttentionBackend(Attention, Protocol):
    """The same as a runner sees it: it is told of each step first."""

    def begin(self, plan: Plan) -> torch.Tensor:
        """Prepare for a step and return the new tokens' positions, [tokens] int64 on the device."""


@dataclass(slots=True)
class _Group:
    """Rows with one new token each, that see about as many tokens; `length` of them are gathered, `mask` hides some."""

    tokens: torch.Tensor | slice
    pages: torch.Tensor
    rows: int
    length: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class _Chunk:
    """One row with several new tokens; `pages` is None where they see nothing before themselves."""

    tokens: slice
    pages: torch.Tensor | None
    length: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class _Rows:
    """A step's rows as layers with the same window see them."""

    groups: list[_Group]
    chunks: list[_Chunk]


class PoolAttention:
    """What back ends over a pool have in common: where a step's tokens are, and for which of them they are asked.

    Args:
        pool: keys and values of all layers.
        heads, head_size: of the queries.
        dtype, device: of what is computed.
        windows: of each layer how many tokens one sees, itself included, or None for all; empty if all see all.
        queries: for which of a row's new tokens attention is computed here, where ranks share them; keys and values are
            stored for all of them, and what others compute is 0.
    """

    def __init__(
        self,
        pool: KvPool,
        heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None] = (),
        queries: Part = ALL,
    ) -> None:
        self._pool = pool
        self._queries = queries
        self._heads = heads
        self._size = head_size
        self._dtype = dtype
        self._device = device
        self._kv_heads = pool.layers[0].shape[3]
        self._windows = list(windows) or [None] * len(pool.layers)
        self._places = torch.empty(0)
        self.mine: slice | None = None

    def _place(self, plan: Plan) -> tuple[np.ndarray, Plan, np.ndarray]:
        """Note where the new tokens' keys and values go.

        Returns:
            Positions of all new tokens, the step as far as attention is computed here, and where its rows begin.
        """
        page, firsts = self._pool.page, np.cumsum(plan.counts) - plan.counts
        row_of = np.repeat(np.arange(len(plan.counts)), plan.counts)
        positions = plan.starts[row_of] + np.arange(len(row_of)) - firsts[row_of]
        places = plan.tables[row_of, positions // page] * page + positions % page
        self._places = upload(places, self._device)
        return positions, *self._asked(plan, firsts)

    def _store(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        """Write the new tokens' keys and values to a layer's pages; the pages."""
        pool = self._pool.layers[layer]
        pool.flatten(0, 1).index_copy_(0, self._places, kv)
        return pool

    def _asked(self, plan: Plan, firsts: np.ndarray) -> tuple[Plan, np.ndarray]:
        """The step as far as attention is computed here, and where its rows begin among the new tokens.

        A share of a row's new tokens is like a row with fewer of them, behind more that are in the pool already.
        """
        if self._queries.of == 1:
            return plan, firsts
        # Rows of one token are dealt out too, and not all to the last one.
        spans = [self._queries.span(int(n)) if n > 1 else self._dealt(row) for row, n in enumerate(plan.counts)]
        begins, counts = np.array([s.start for s in spans]), np.array([s.count for s in spans])
        some = np.flatnonzero(counts)
        begins, counts = begins[some], counts[some]
        asked = replace(plan, starts=plan.starts[some] + begins, counts=counts, tables=plan.tables[some])
        return asked, firsts[some] + begins

    def _dealt(self, row: int) -> Span:
        mine = row % self._queries.of == self._queries.index
        return Span(0, int(mine), 1)

    def _out(self, q: torch.Tensor) -> torch.Tensor:
        """Room for results, [tokens, heads * head size]."""
        shape = (q.shape[0], self._heads * self._size)
        return q.new_empty(shape) if self._queries.of == 1 else q.new_zeros(shape)


class TorchAttention(PoolAttention):
    """Gather and `scaled_dot_product_attention`. Arguments as of `PoolAttention`.

    The query heads that share a KV head are folded into the query axis (decode) or get the KV head by a stride of zero
    (prefill), so keys and values are never repeated in memory.
    """

    def __init__(
        self,
        pool: KvPool,
        heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None] = (),
        queries: Part = ALL,
    ) -> None:
        super().__init__(pool, heads, head_size, dtype, device, windows, queries)
        self._buffer = torch.empty(0, *pool.layers[0].shape[1:], dtype=dtype, device=device)
        self._rows: dict[int | None, _Rows] = {}

    def begin(self, plan: Plan) -> torch.Tensor:
        positions, plan, firsts = self._place(plan)
        lengths = plan.starts + plan.counts
        # A window that is longer than all rows is none.
        longest = int(lengths.max(initial=0))
        binding = {w: None if w is None or w >= longest else w for w in self._windows}
        seen = {window: self._see(plan, firsts, lengths, window) for window in set(binding.values())}
        self._rows = {window: seen[bound] for window, bound in binding.items()}
        gathered = [group.pages for rows in seen.values() for group in rows.groups]
        gathered += [chunk.pages for rows in seen.values() for chunk in rows.chunks if chunk.pages is not None]
        needed = max(map(len, gathered), default=0)
        if needed > len(self._buffer):
            # Grows by half at least, so that a lengthening batch does not allocate at each step.
            size = max(needed, len(self._buffer) * 3 // 2)
            self._buffer = self._buffer.new_empty(size, *self._buffer.shape[1:])
        return upload(positions, self._device)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        self._store(layer, kv)
        out = self._out(q)
        rows = self._rows[self._windows[layer]]
        self._attend_singles(layer, rows, q, out)
        self._attend_chunks(layer, rows, q, kv, out)
        return out

    def _attend_singles(self, layer: int, rows: _Rows, q: torch.Tensor, out: torch.Tensor) -> None:
        """Rows with one new token."""
        pool = self._pool.layers[layer]
        for group in rows.groups:
            keys, values = self._gather(pool, group.pages, group.rows, group.length)
            folded = q[group.tokens].view(group.rows, self._kv_heads, -1, self._size)
            result = F.scaled_dot_product_attention(
                folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=group.mask
            )
            out[group.tokens] = result.reshape(group.rows, -1)

    def _attend_chunks(self, layer: int, rows: _Rows, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """Rows with several new tokens."""
        pool = self._pool.layers[layer]
        for chunk in rows.chunks:
            if chunk.pages is None:
                keys, values = kv[None, chunk.tokens, 0], kv[None, chunk.tokens, 1]
            else:
                keys, values = self._gather(pool, chunk.pages, 1, chunk.length)
            count = chunk.tokens.stop - chunk.tokens.start
            # The KV heads become the batch axis: [kv heads, group, tokens, head size].
            query = q[chunk.tokens].view(count, self._kv_heads, -1, self._size).permute(1, 2, 0, 3)
            spread = (self._kv_heads, query.shape[1], chunk.length, self._size)
            result = F.scaled_dot_product_attention(
                query,
                keys[0].transpose(0, 1)[:, None].expand(spread),
                values[0].transpose(0, 1)[:, None].expand(spread),
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
            )
            out[chunk.tokens] = result.permute(2, 0, 1, 3).reshape(count, -1)

    def _gather(
        self, pool: torch.Tensor, pages: torch.Tensor, rows: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some rows: two views [rows, length, kv heads, head size] of the buffer."""
        gathered = self._buffer[: len(pages)]
        torch.index_select(pool, 0, pages, out=gathered)
        gathered = gathered.view(rows, -1, *pool.shape[2:])[:, :length]
        return gathered[:, :, 0], gathered[:, :, 1]

    def _see(self, plan: Plan, firsts: np.ndarray, lengths: np.ndarray, window: int | None) -> _Rows:
        """What each row sees through a window: what lies before it is not gathered, but for the rest of a page."""
        oldest = np.zeros_like(lengths) if window is None else np.maximum(plan.starts + 1 - window, 0)
        begins = oldest // self._pool.page * self._pool.page
        return _Rows(
            self._see_singles(plan, firsts, lengths, begins, oldest),
            [
                self._chunk(plan, int(row), int(firsts[row]), int(lengths[row]), int(begins[row]), window)
                for row in np.flatnonzero(plan.counts > 1)
            ],
        )

    def _see_singles(
        self, plan: Plan, firsts: np.ndarray, lengths: np.ndarray, begins: np.ndarray, oldest: np.ndarray
    ) -> list[_Group]:
        singles = np.flatnonzero(plan.counts == 1)
        return [
            self._group(plan, rows, firsts[rows], lengths[rows] - begins[rows], begins[rows], oldest[rows])
            for rows in group_by_length(singles, lengths - begins)
        ]

    def _group(
        self,
        plan: Plan,
        rows: np.ndarray,
        firsts: np.ndarray,
        lengths: np.ndarray,
        begins: np.ndarray,
        oldest: np.ndarray,
    ) -> _Group:
        length = int(lengths.max())
        width = -(-length // self._pool.page)
        mask = None
        if int(lengths.min()) != length or np.any(oldest != begins):
            at = np.arange(length)
            hidden = (at >= lengths[:, None]) | (at < (oldest - begins)[:, None])
            mask = torch.zeros(len(rows), 1, 1, length, dtype=self._dtype, device=self._device)
            mask.masked_fill_(upload(hidden, self._device)[:, None, None], float("-inf"))
        first, last = int(firsts[0]), int(firsts[-1])
        tokens: torch.Tensor | slice = slice(first, last + 1)
        if last - first != len(rows) - 1 or np.any(np.diff(firsts) != 1):
            tokens = upload(firsts, self._device)
        if begins.any():
            # Behind a short row's end the table may end too; what is read there instead is hidden.
            columns = np.minimum(begins[:, None] // self._pool.page + np.arange(width), plan.tables.shape[1] - 1)
            table = plan.tables[rows[:, None], columns]
        else:
            table = np.ascontiguousarray(plan.tables[rows, :width])
        pages = upload(table.reshape(-1), self._device)
        return _Group(tokens, pages, len(rows), length, mask)

    def _chunk(self, plan: Plan, row: int, first: int, end: int, begin: int, window: int | None) -> _Chunk:
        start, count = int(plan.starts[row]), int(plan.counts[row])
        tokens, length = slice(first, first + count), end - begin
        pages = None
        if start > 0:
            page = self._pool.page
            columns = slice(begin // page, -(-end // page))
            pages = upload(np.ascontiguousarray(plan.tables[row, columns]), self._device)
        elif window is None or end <= window:
            return _Chunk(tokens, None, length, None)
        mask = torch.full((count, length), float("-inf"), dtype=self._dtype, device=self._device)
        mask.triu_(start - begin + 1)
        if window is not None and end > window:
            mask += torch.full_like(mask, float("-inf")).tril_(start - begin - window)
        return _Chunk(tokens, pages, length, mask)


def group_by_length(rows: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Split rows into groups of similar length, so that few pay for the longest.

    Args:
        rows: indices into `lengths`.
        lengths: tokens of each row.

    Returns:
        Groups of row indices; in one group, the padding up to its longest row is at most `_GROUP_WASTE` tokens.
    """
    if len(rows) == 0:
        return []
    order = rows[np.argsort(-lengths[rows], kind="stable")]
    sizes = lengths[order].tolist()
    groups, begin, waste = [], 0, 0
    for i, size in enumerate(sizes):
        waste += sizes[begin] - size
        if waste > _GROUP_WASTE:
            groups.append(np.sort(order[begin:i]))
            begin, waste = i, 0
    groups.append(np.sort(order[begin:]))
    return groups
