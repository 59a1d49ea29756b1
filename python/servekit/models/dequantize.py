"""Numbers out of a GGUF file's tensors.

Blocks of the common kinds are unpacked here, as many at a time as a processor's cache holds; the others by the `gguf`
package, which knows all but goes through a tensor in small pieces.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from servekit.models.gguf_file import TENSOR_TYPES, GgufTensor

_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
_AT_ONCE = 1 << 18
"""Numbers that are unpacked in one go."""


def dequantize(tensor: GgufTensor) -> torch.Tensor:
    """Values of a tensor, in its shape: as stored for F32, F16, BF16 and F64, else float32. The result is a copy.

    Raises:
        NotImplementedError, ValueError: a kind that nothing here can read.
    """
    if tensor.type_name in _PLAIN:
        return torch.from_numpy(np.frombuffer(tensor.data, _PLAIN[tensor.type_name]).reshape(tensor.shape).copy())
    if tensor.type_name == "BF16":
        return torch.from_numpy(np.frombuffer(tensor.data, np.int16).reshape(tensor.shape).copy()).view(torch.bfloat16)
    raw = np.frombuffer(tensor.data, np.uint8)
    if tensor.type_name not in _BLOCKS:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize as by_package

        values = by_package(raw.reshape(*tensor.shape[:-1], -1), GGMLQuantizationType(tensor.type_id))
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]).reshape(tensor.shape))
    kind, unpack = TENSOR_TYPES[tensor.type_id], _BLOCKS[tensor.type_name]
    blocks = raw.reshape(-1, kind.block_bytes)
    out = np.empty((len(blocks), kind.block), np.float32)
    step = _AT_ONCE // kind.block
    for begin in range(0, len(blocks), step):
        unpack(blocks[begin : begin + step], out[begin : begin + step])
    return torch.from_numpy(out.reshape(tensor.shape))


Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]


def _halves(blocks: Bytes, at: int) -> Values:
    """The float16 at a byte of every block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, out: Values) -> None:
    """[blocks, 16] bytes to [blocks, 32] numbers 0 to 15: the low halves come first."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _q4_0(blocks: Bytes, out: Values) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _halves(blocks, 0)


def _q4_1(blocks: Bytes, out: Values) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _q8_0(blocks: Bytes, out: Values) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks, 0), out=out)


def _scale_eighths(blocks: Bytes, out: Values) -> None:
    """Multiply each 32 numbers of a block by their scale and subtract their minimum.

    Both are products of the block's float16 and a number of 6 bits. Of the first four eighths these are the low bits
    of bytes 4 to 7 and 8 to 11; of the others the halves of bytes 12 to 15, and the two bits that were left above.
    """
    low, high = blocks[:, 4:12], blocks[:, 12:16]
    scales = np.concatenate((low[:, :4] & 63, (high & 15) | (low[:, :4] >> 6 << 4)), 1)
    minima = np.concatenate((low[:, 4:] & 63, (high >> 4) | (low[:, 4:] >> 6 << 4)), 1)
    eighths = out.reshape(-1, 8, 32)
    eighths *= (_halves(blocks, 0) * scales)[:, :, None]
    eighths -= (_halves(blocks, 2) * minima)[:, :, None]


def _q4_k(blocks: Bytes, out: Values) -> None:
    packed, pairs = blocks[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 2, 32)
    pairs[:, :, 0] = packed & 15
    pairs[:, :, 1] = packed >> 4
    _scale_eighths(blocks, out)


def _q5_k(blocks: Bytes, out: Values) -> None:
    fifth, packed = blocks[:, 16:48], blocks[:, 48:].reshape(-1, 4, 32)
    eighths = out.reshape(-1, 8, 32)
    for i in range(8):
        four = packed[:, i // 2] >> 4 if i % 2 else packed[:, i // 2] & 15
        eighths[:, i] = four | (fifth >> i & 1) << 4
    _scale_eighths(blocks, out)


def _q6_k(blocks: Bytes, out: Values) -> None:
    """Low four bits, then the upper two, of each half; then a scale for each 16 numbers and one for all."""
    eighths = out.reshape(-1, 2, 4, 32)
    for half in range(2):
        four = blocks[:, 64 * half : 64 * half + 64].reshape(-1, 2, 32)
        two = blocks[:, 128 + 32 * half : 160 + 32 * half]
        for i in range(4):
            low = four[:, i % 2] >> 4 if i >= 2 else four[:, i % 2] & 15
            eighths[:, half, i] = low | (two >> 2 * i & 3) << 4
    out -= 32
    sixteenths = out.reshape(-1, 16, 16)
    sixteenths *= (_halves(blocks, 208) * blocks[:, 192:208].view(np.int8))[:, :, None]


_BLOCKS: dict[str, Callable[[Bytes, Values], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
