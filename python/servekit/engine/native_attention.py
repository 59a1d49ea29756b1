"""Attention on a CPU that reads keys and values from their pages, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from servekit._core import PagedAttention
from servekit.engine import native
from servekit.engine.attention import PoolAttention
from servekit.engine.kv_cache import KvPool
from servekit.engine.plan import Ints, Plan
from servekit.models.split import ALL, Part


@dataclass(slots=True)
class StepRows:
    """A step's rows as the extension reads them: how many, and addresses of what `arrays` holds.

    Attributes:
        arrays: of each row the first of its tokens among the step's, new tokens, tokens in the pages, page numbers.
    """

    arrays: tuple[Ints, Ints, Ints, Ints]
    count: int = field(init=False)
    width: int = field(init=False)
    firsts: int = field(init=False)
    counts: int = field(init=False)
    lengths: int = field(init=False)
    tables: int = field(init=False)

    def __post_init__(self) -> None:
        self.count, self.width = self.arrays[3].shape
        self.firsts, self.counts, self.lengths, self.tables = (array.ctypes.data for array in self.arrays)


class NativeAttention(PoolAttention):
    """The extension's kernel. Arguments as of `PoolAttention`.

    What a token sees is summed up in one order, so its result is the same to the last bit whether its prompt is
    computed at once, in chunks, or token by token.
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
        self.kernel = PagedAttention(native.pool(), heads, self._kv_heads, head_size, pool.page)
        self._addresses = [layer.data_ptr() for layer in pool.layers]
        none = np.zeros(0, np.int64)
        self._rows = StepRows((none, none, none, none[None]))

    def begin(self, plan: Plan) -> torch.Tensor:
        positions, plan, firsts = self._place(plan)
        arrays = (firsts, plan.counts, plan.starts + plan.counts, plan.tables)
        firsts, counts, lengths, tables = (np.ascontiguousarray(array, np.int64) for array in arrays)
        self._rows = StepRows((firsts, counts, lengths, tables))
        return torch.from_numpy(positions)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        pages, window = self.pages(layer)
        places, rows = self.step
        self.kernel.store(pages, kv.data_ptr(), kv.stride(0), places, len(kv))
        out = self._out(q)
        self.kernel.attend(pages, q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0), rows, window)
        return out

    def pages(self, layer: int) -> tuple[int, int]:
        """Where a layer's pages are, and how many tokens one sees in it, 0 for all."""
        return self._addresses[layer], self._windows[layer] or 0

    @property
    def step(self) -> tuple[int, StepRows]:
        """Of the step that was begun: where the places of its tokens are, [tokens] int64, and its rows."""
        return self._places.data_ptr(), self._rows
