"""The KV pool: keys and values of all sequences, in pages of a fixed number of tokens."""

from __future__ import annotations

import mmap

import torch


class KvPool:
    """One tensor a layer: [pages, page, 2, kv heads, head size], keys at 0 and values at 1.

    With keys and values of a token side by side, one copy writes both and one gather reads both. Page 0 belongs to
    nobody: it pads the page tables, and stays zero.

    Args:
        layers, kv_heads, head_size: of the model.
        pages: usable pages; one more is allocated for padding.
        page: tokens in a page.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_size: int,
        pages: int,
        page: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page = page
        self.pages = pages
        shape = (pages + 1, page, 2, kv_heads, head_size)
        self.layers = [_zeros(shape, dtype, device) for _ in range(layers)]

    @staticmethod
    def token_bytes(layers: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
        """Bytes that one token takes in all layers."""
        return layers * 2 * kv_heads * head_size * int(dtype.itemsize)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory on a CPU until they are written: torch.zeros would touch every page at start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = 1
    for n in shape:
        count *= n
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
