"""Numbers out of a GGUF file's tensors.

Blocks of the common simple kinds are unpacked here, a whole tensor at once; the others by the `gguf` package, which
knows all but goes through a tensor in small pieces.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from servekit.models.gguf_file import TENSOR_TYPES, GgufTensor

_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


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
    if tensor.type_name in _BLOCKS:
        kind = TENSOR_TYPES[tensor.type_id]
        values = _BLOCKS[tensor.type_name](raw.reshape(-1, kind.block_bytes))
    else:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize as by_package

        values = by_package(raw.reshape(*tensor.shape[:-1], -1), GGMLQuantizationType(tensor.type_id))
    return torch.from_numpy(np.require(values, np.float32, ["C", "W"]).reshape(tensor.shape))


Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]


def _scale(blocks: Bytes, at: int) -> Values:
    """The float16 at a byte of every block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Values:
    """[blocks, 16] bytes to [blocks, 32] numbers 0 to 15: the low halves come first."""
    out = np.empty((len(packed), 32), np.float32)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out


def _q4_0(blocks: Bytes) -> Values:
    values = _nibbles(blocks[:, 2:])
    values -= 8
    values *= _scale(blocks, 0)
    return values


def _q4_1(blocks: Bytes) -> Values:
    values = _nibbles(blocks[:, 4:])
    values *= _scale(blocks, 0)
    values += _scale(blocks, 2)
    return values


def _q8_0(blocks: Bytes) -> Values:
    return blocks[:, 2:].view(np.int8) * _scale(blocks, 0)


_BLOCKS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
