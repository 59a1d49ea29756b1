"""The arithmetic of the wheel's own extension, over torch's tensors on a CPU.

It computes in float32, with threads of its own that sleep when nothing is to be done. A row's result does not depend on
the other rows of a call. On processors that there are no vector instructions for here, torch does the small things
(`serves`), and products take part in the race of `choose_linear` like every other kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from servekit._core import KernelPool, StoredMatrix

_BLOCKS = {name: (weights, size) for name, weights, size in KernelPool.formats}
_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@cache
def pool() -> KernelPool:
    """The threads that all kernels of this process share: as many as torch has when they are first used."""
    return KernelPool(torch.get_num_threads())


@cache
def vectors() -> bool:
    """Whether there are vector instructions for the kernels on this processor."""
    return pool().level != "portable"


def serves(x: torch.Tensor) -> bool:
    """Whether the kernels take this tensor and are better than torch at it: float32 on a CPU with vectors."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and vectors()


@dataclass(slots=True, frozen=True)
class Stored:
    """A matrix as its file stores it.

    Attributes:
        format: GGUF's name of the format, such as Q4_1.
        data: [rows, bytes of a row] uint8, contiguous.
        width: weights in a row.
    """

    format: str
    data: torch.Tensor
    width: int

    @classmethod
    def known(cls, format_name: str, width: int) -> bool:
        """Whether there is a kernel for rows of so many weights in a format."""
        return format_name in _BLOCKS and width % _BLOCKS[format_name][0] == 0

    @classmethod
    def of(cls, weight: torch.Tensor) -> Stored | None:
        """A plain matrix, None if there is no kernel for it."""
        name = _PLAIN.get(weight.dtype)
        if name is None or not cls.known(name, weight.shape[1]):
            return None
        return cls(name, weight.contiguous().view(torch.uint8), weight.shape[1])

    def columns(self, start: int, stop: int) -> Stored | None:
        """Some of its columns, None where they do not begin and end with the format's blocks."""
        block, size = _BLOCKS[self.format]
        if start % block or stop % block:
            return None
        data = self.data[:, start // block * size : stop // block * size].contiguous()
        return Stored(self.format, data, stop - start)

    @classmethod
    def filled(cls, format_name: str, rows: int, width: int) -> Stored:
        """A matrix of some small numbers, to measure with."""
        block, size = _BLOCKS[format_name]
        return cls(format_name, torch.full((rows, width // block * size), 0x11, dtype=torch.uint8), width)


class NativeLinear:
    """Products with weights that stay as their file stores them; x is float32 on the CPU.

    Nothing is rounded but float32's own arithmetic, and a row's result does not depend on the other rows.

    Args:
        parts: matrices of the same width, whose outputs lie one after the other; those of one format become one.
        bias: of all outputs, or None.

    Attributes:
        matrices: the same for the extension, with their parts of the bias.
    """

    __slots__ = ("_at", "_kept", "_rows", "_width", "matrices")

    def __init__(self, parts: Sequence[Stored], bias: torch.Tensor | None = None) -> None:
        joined: list[Stored] = []
        for part in parts:
            if joined and joined[-1].format == part.format:
                part = Stored(part.format, torch.cat((joined.pop().data, part.data)), part.width)
            joined.append(part)
        self._width = joined[0].width
        bias = None if bias is None else bias.float().contiguous()
        # What the addresses below point into.
        self._kept = ([part.data.contiguous() for part in joined], bias)
        self.matrices: list[StoredMatrix] = []
        # Of each, where its outputs begin, in bytes.
        self._at: list[int] = []
        at = 0
        for part, data in zip(joined, self._kept[0], strict=True):
            rows = data.shape[0]
            at_bias = 0 if bias is None else bias.data_ptr() + 4 * at
            self.matrices.append(StoredMatrix(pool(), part.format, data.data_ptr(), at_bias, rows, part.width))
            self._at.append(4 * at)
            at += rows
        self._rows = at

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or x.shape[-1] != self._width:
            raise ValueError(f"a layer for float32 rows of {self._width} got {x.dtype} rows of {x.shape[-1]}")
        x = x.contiguous()
        count = x.shape[0]
        out = x.new_empty(count, self._rows)
        for matrix, at in zip(self.matrices, self._at, strict=True):
            matrix.apply(x.data_ptr(), out.data_ptr() + at, count, self._rows)
        return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm, x / sqrt(mean(x * x) + eps) * weight over the last axis, for tensors that are served."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    pool().rms_norm(x.data_ptr(), out.data_ptr(), weight.data_ptr(), eps, x.numel() // width, width)
    return out


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn heads in place: x [tokens, heads, size] of contiguous tokens, tables as `Rope.table` makes them."""
    tokens, heads, size = x.shape
    pool().rotate(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), tokens, heads, size)


def add_(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add y to x in place, contiguous tensors of the same shape that are served; returns x."""
    pool().add(x.data_ptr(), y.data_ptr(), x.numel())
    return x


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x [rows, gates then ups], contiguous and served."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    pool().silu_mul(x.data_ptr(), out.data_ptr(), rows, width)
    return out
