"""Attention on a CPU whose rows with one new token read keys and values from their pages, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from servekit._core import PagedAttention
from servekit.engine import native
from servekit.engine.attention import TorchAttention, _Group, _Rows
from servekit.engine.kv_cache import KvPool
from servekit.engine.plan import Ints, Plan
from servekit.models.split import ALL, Part


@dataclass(slots=True)
class _Singles:
    """A step's rows with one new token: which token that is, tokens in the pages, and [rows, width] page numbers."""

    tokens: Ints
    lengths: Ints
    tables: Ints


class NativeAttention(TorchAttention):
    """The extension's kernel for rows with one new token, torch's for prompts. Arguments as of `TorchAttention`."""

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
        self._kernel = PagedAttention(native.pool(), heads, self._kv_heads, head_size, pool.page)
        self._addresses = [layer.data_ptr() for layer in pool.layers]
        self._singles = _Singles(*(np.empty(0, np.int64) for _ in range(3)))
        self._singles_at = (0, 0, 0)

    def begin(self, plan: Plan) -> torch.Tensor:
        positions = super().begin(plan)
        plan, firsts = self._asked(plan, np.cumsum(plan.counts) - plan.counts)
        rows, lengths = np.flatnonzero(plan.counts == 1), plan.starts + plan.counts
        s = self._singles = _Singles(firsts[rows], lengths[rows], np.ascontiguousarray(plan.tables[rows], np.int64))
        self._singles_at = (s.tokens.ctypes.data, s.lengths.ctypes.data, s.tables.ctypes.data)
        return positions

    def _see_singles(
        self, plan: Plan, firsts: np.ndarray, lengths: np.ndarray, begins: np.ndarray, oldest: np.ndarray
    ) -> list[_Group]:
        return []

    def _store(self, layer: int, kv: torch.Tensor) -> None:
        self._kernel.store(
            self._addresses[layer], kv.data_ptr(), kv.stride(0), self._places.data_ptr(), len(self._places)
        )

    def _attend_singles(self, layer: int, rows: _Rows, q: torch.Tensor, out: torch.Tensor) -> None:
        count = len(self._singles.tokens)
        if not count:
            return
        tokens, lengths, tables = self._singles_at
        width = self._singles.tables.shape[1]
        self._kernel.attend(
            self._addresses[layer],
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            out.stride(0),
            tokens,
            lengths,
            tables,
            width,
            count,
            self._windows[layer] or 0,
        )
