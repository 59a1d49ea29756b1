"""Which back end computes attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from servekit.engine import native
from servekit.engine.attention import AttentionBackend, TorchAttention
from servekit.engine.device import DeviceError
from servekit.engine.flashinfer_attention import HEAD_SIZES, FlashInferAttention
from servekit.engine.kv_cache import KvPool
from servekit.engine.native_attention import NativeAttention
from servekit.models.split import ALL, Part


def make_attention(
    name: str,
    pool: KvPool,
    heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
    windows: Sequence[int | None] = (),
    queries: Part = ALL,
) -> AttentionBackend:
    """The back end for a pool.

    Args:
        name: auto, torch or flashinfer; auto is the extension's kernel where it fits, else torch.
        pool, heads, head_size, dtype, device, windows, queries: as of `PoolAttention`.

    Raises:
        DeviceError: FlashInfer is not installed, or has no kernel for this.
    """
    if name == "flashinfer":
        _check_flashinfer(head_size, dtype, device, queries)
        return FlashInferAttention(pool, heads, head_size, device, windows)
    fits = name == "auto" and native.serves(pool.layers[0]) and head_size % 16 == 0
    return (NativeAttention if fits else TorchAttention)(pool, heads, head_size, dtype, device, windows, queries)


def _check_flashinfer(head_size: int, dtype: torch.dtype, device: torch.device, queries: Part) -> None:
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        why = "needs a CUDA device and --dtype bfloat16 or float16"
    elif head_size not in HEAD_SIZES:
        why = f"has kernels for heads of {', '.join(map(str, HEAD_SIZES))}, not of {head_size}"
    elif queries.of > 1:
        why = "does not work with --attention-context-parallel-size"
    else:
        return
    raise DeviceError(f"--attention-backend flashinfer {why}: take torch")
