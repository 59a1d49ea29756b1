"""Attention over the paged KV pool, behind one interface.

A back end is told of a step once (`begin`), then asked for every layer (`attend`). The torch back end works on every
device: it gathers a sequence's pages into a preallocated buffer and calls torch's own kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from servekit.engine.kv_cache import KvPool
from servekit.engine.plan import Plan

_GROUP_WASTE = 256
"""Padded tokens that cost about as much as the calls for one more group of rows."""


class Attention(Protocol):
    """Causal attention of a step's new tokens over their own sequences."""

    def begin(self, plan: Plan) -> torch.Tensor:
        """Prepare for a step and return the new tokens' positions, [tokens] int64 on the device."""

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Store the new tokens' keys and values, all of them, then attend.

        A row may read what another row of the same step stores: requests share their prefixes while these are made.

        Args:
            q: [tokens, heads, head size].
            kv: [tokens, 2, kv heads, head size].

        Returns:
            [tokens, heads * head size].
        """


@dataclass(slots=True)
class _Group:
    """Rows with one new token each, and of similar length; `masks` are by window, None where nothing is hidden."""

    tokens: torch.Tensor | slice
    pages: torch.Tensor
    rows: int
    length: int
    masks: dict[int, torch.Tensor | None]


@dataclass(slots=True)
class _Chunk:
    """One row with several new tokens; `pages` is None where the sequence begins with them. `masks` are by window, None
    where all that is hidden is what comes later in a sequence that begins here.
    """

    tokens: slice
    pages: torch.Tensor | None
    length: int
    masks: dict[int, torch.Tensor | None]


class TorchAttention:
    """Gather and `scaled_dot_product_attention`.

    The query heads that share a KV head are folded into the query axis (decode) or get the KV head by a stride of zero
    (prefill), so keys and values are never repeated in memory.

    Args:
        pool: where keys and values are kept.
        heads, head_size: of the queries.
        dtype, device: of queries, keys and values.
        windows: for each layer, how many tokens back it sees, its own included; 0 sees all. Empty: all layers see all.
    """

    def __init__(
        self,
        pool: KvPool,
        heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int] = (),
    ) -> None:
        self._windows = tuple(windows) or (0,) * len(pool.layers)
        self._pool = pool
        self._heads = heads
        self._size = head_size
        self._dtype = dtype
        self._device = device
        self._kv_heads = pool.layers[0].shape[3]
        self._buffer = torch.empty(0, *pool.layers[0].shape[1:], dtype=dtype, device=device)
        self._groups: list[_Group] = []
        self._chunks: list[_Chunk] = []
        self._places = torch.empty(0)

    def begin(self, plan: Plan) -> torch.Tensor:
        page, ends = self._pool.page, np.cumsum(plan.counts)
        firsts = ends - plan.counts
        row_of = np.repeat(np.arange(len(plan.counts)), plan.counts)
        positions = plan.starts[row_of] + np.arange(len(row_of)) - firsts[row_of]
        places = plan.tables[row_of, positions // page] * page + positions % page
        self._places = torch.from_numpy(places).to(self._device)
        lengths = plan.starts + plan.counts
        self._chunks = [
            self._chunk(plan, int(row), int(firsts[row]), int(lengths[row])) for row in np.flatnonzero(plan.counts > 1)
        ]
        singles = np.flatnonzero(plan.counts == 1)
        self._groups = [
            self._group(plan, rows, firsts[rows], lengths[rows]) for rows in group_by_length(singles, lengths)
        ]
        needed = max((g.pages.numel() for g in self._groups), default=0)
        needed = max(needed, max((0 if c.pages is None else c.pages.numel() for c in self._chunks), default=0))
        if needed > len(self._buffer):
            # Grows by half at least, so that a lengthening batch does not allocate at each step.
            size = max(needed, len(self._buffer) * 3 // 2)
            self._buffer = self._buffer.new_empty(size, *self._buffer.shape[1:])
        return torch.from_numpy(positions).to(self._device)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        pool, window = self._pool.layers[layer], self._windows[layer]
        pool.flatten(0, 1).index_copy_(0, self._places, kv)
        out = q.new_empty(q.shape[0], self._heads * self._size)
        for group in self._groups:
            keys, values = self._gather(pool, group.pages, group.rows, group.length)
            folded = q[group.tokens].view(group.rows, self._kv_heads, -1, self._size)
            result = F.scaled_dot_product_attention(
                folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=group.masks[window]
            )
            out[group.tokens] = result.reshape(group.rows, -1)
        for chunk in self._chunks:
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
                attn_mask=chunk.masks[window],
                is_causal=chunk.masks[window] is None,
            )
            out[chunk.tokens] = result.permute(2, 0, 1, 3).reshape(count, -1)
        return out

    def _gather(
        self, pool: torch.Tensor, pages: torch.Tensor, rows: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some rows: two views [rows, length, kv heads, head size] of the buffer."""
        gathered = self._buffer[: len(pages)]
        torch.index_select(pool, 0, pages, out=gathered)
        gathered = gathered.view(rows, -1, *pool.shape[2:])[:, :length]
        return gathered[:, :, 0], gathered[:, :, 1]

    def _group(self, plan: Plan, rows: np.ndarray, firsts: np.ndarray, lengths: np.ndarray) -> _Group:
        length = int(lengths.max())
        width = -(-length // self._pool.page)
        masks: dict[int, torch.Tensor | None] = {}
        for window in set(self._windows):
            masks[window] = None
            if int(lengths.min()) != length or 0 < window < length:
                hidden = np.arange(length) >= lengths[:, None]
                if window:
                    hidden |= np.arange(length) < lengths[:, None] - window
                masks[window] = self._mask(hidden)[:, None, None]
        first, last = int(firsts[0]), int(firsts[-1])
        tokens: torch.Tensor | slice = slice(first, last + 1)
        if last - first != len(rows) - 1 or np.any(np.diff(firsts) != 1):
            tokens = torch.from_numpy(firsts).to(self._device)
        pages = torch.from_numpy(np.ascontiguousarray(plan.tables[rows, :width]).reshape(-1)).to(self._device)
        return _Group(tokens, pages, len(rows), length, masks)

    def _chunk(self, plan: Plan, row: int, first: int, length: int) -> _Chunk:
        start, count = int(plan.starts[row]), int(plan.counts[row])
        tokens = slice(first, first + count)
        masks: dict[int, torch.Tensor | None] = {}
        for window in set(self._windows):
            masks[window] = None
            if start or 0 < window < length:
                behind = np.arange(start, length)[:, None] - np.arange(length)
                masks[window] = self._mask((behind < 0) | (behind >= (window or length)))
        if start == 0:
            return _Chunk(tokens, None, length, masks)
        width = -(-length // self._pool.page)
        pages = torch.from_numpy(np.ascontiguousarray(plan.tables[row, :width])).to(self._device)
        return _Chunk(tokens, pages, length, masks)

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        """What is added to scores: minus infinity where a key is hidden."""
        mask = torch.zeros(hidden.shape, dtype=self._dtype)
        mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))
        return mask.to(self._device)


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
