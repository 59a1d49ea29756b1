"""Attention on CUDA by FlashInfer, whose kernels read keys and values in their pages.

FlashInfer (https://docs.flashinfer.ai, "Paged KV-Cache") plans a step once for all layers: where each row's tokens
begin, which pages it has, how full the last one is. Nothing is gathered; rows with one new token go with all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from servekit.engine.attention import PoolAttention
from servekit.engine.device import DeviceError, upload
from servekit.engine.kv_cache import KvPool
from servekit.engine.plan import Ints, Plan

HEAD_SIZES = (64, 128, 256)
"""What its kernels are compiled for everywhere."""
_WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation recommends."""


class FlashInferAttention(PoolAttention):
    """`AttentionBackend` with FlashInfer's kernels.

    Args:
        pool: keys and values of all layers, in float16 or bfloat16.
        heads, head_size: of the queries.
        device: a CUDA device.
        windows: as of `TorchAttention`.

    Raises:
        DeviceError: FlashInfer is not installed.
    """

    def __init__(
        self, pool: KvPool, heads: int, head_size: int, device: torch.device, windows: Sequence[int | None] = ()
    ) -> None:
        try:
            import flashinfer
        except ImportError as error:
            raise DeviceError(
                "FlashInfer is not installed: pip install 'servekit[flashinfer]', or take --attention-backend torch"
            ) from error
        super().__init__(pool, heads, head_size, pool.layers[0].dtype, device, windows)
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # The layers of one window share a plan, and all share the workspace: they run one after the other.
        self._kernels: dict[int | None, Any] = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for window in set(self._windows)
        }

    def begin(self, plan: Plan) -> torch.Tensor:
        """See `AttentionBackend`. The plan's numbers stay on the host, where FlashInfer wants to read them."""
        page = self._pool.page
        positions, _, _ = self._place(plan)
        lengths = plan.starts + plan.counts
        used = -(-lengths // page)
        pages = plan.tables[np.arange(plan.tables.shape[1]) < used[:, None]]
        row_tokens, row_pages = _offsets(plan.counts), _offsets(used)
        last = torch.from_numpy((lengths - (used - 1) * page).astype(np.int32))
        indices = upload(pages.astype(np.int32), self._device)
        for window, kernel in self._kernels.items():
            kernel.plan(
                row_tokens,
                row_pages,
                indices,
                last,
                self._heads,
                self._kv_heads,
                self._size,
                page,
                causal=True,
                # Counted without the token itself.
                window_left=-1 if window is None else window - 1,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )
        return upload(positions, self._device)

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """See `Attention`."""
        pool = self._store(layer, kv)
        kernel = self._kernels[self._windows[layer]]
        queries = q.reshape(len(q), self._heads, self._size)
        found: torch.Tensor = kernel.run(queries, (pool[:, :, 0], pool[:, :, 1]))
        return found.reshape(len(q), -1)


def _offsets(counts: Ints) -> torch.Tensor:
    """Where each row begins and the last one ends, [rows + 1] int32 on the host."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
