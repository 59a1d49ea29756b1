"""Where weights come from: a folder of safetensors files, or one GGUF file. Names are Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from servekit.models.dequantize import dequantize
from servekit.models.gguf_file import GgufFile


class WeightError(ValueError):
    """Weights that are missing, incomplete or of an unknown kind. One line for the operator."""


class Weights(Protocol):
    """Named tensors, read when asked for."""

    names: frozenset[str]

    def get(self, name: str) -> torch.Tensor:
        """A tensor, (out, in) for matrices.

        Raises:
            WeightError: there is none of this name, or it can't be read.
        """


class SafetensorsWeights:
    """A folder of safetensors files, with or without an index, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            else:
                files = sorted(p.name for p in folder.glob("*.safetensors"))
            if not files:
                raise WeightError(f"{folder} holds no .safetensors file")
            outside = [name for name in files if Path(name).name != name]
            if outside:
                raise WeightError(f"{index} names a file outside its folder: {outside[0]!r}")
            files_open: list[Any] = [safe_open(str(folder / name), framework="pt") for name in files]
        except (OSError, SafetensorError, KeyError, AttributeError, TypeError, json.JSONDecodeError) as error:
            raise WeightError(f"weights in {folder} can't be read: {error}") from error
        self._file_of = {name: file for file in files_open for name in file.keys()}  # noqa: SIM118 (no mapping)
        self.names = frozenset(self._file_of)

    def get(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise WeightError(f"the weights lack the tensor {name!r}")
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor


class GgufWeights:
    """One GGUF file of the llama architecture; quantized tensors come as float32.

    Args:
        file: the open file.
        name_of: Hugging Face's name to the file's.
        heads: of each tensor whose rotary pairs the file interleaves, by the file's name: number of heads.
    """

    def __init__(self, file: GgufFile, name_of: dict[str, str], heads: dict[str, int]) -> None:
        self._file = file
        self._name_of = {name: own for name, own in name_of.items() if own in file.tensors}
        self._heads = heads
        self.names = frozenset(self._name_of)

    def get(self, name: str) -> torch.Tensor:
        if name not in self._name_of:
            raise WeightError(f"the weights lack the tensor {name!r}")
        own = self._name_of[name]
        tensor = self._read(own)
        if own in self._heads:
            tensor = uninterleave(tensor, self._heads[own])
        return tensor

    def _read(self, own: str) -> torch.Tensor:
        entry = self._file.tensors[own]
        try:
            return dequantize(entry)
        except (NotImplementedError, ValueError) as error:
            raise WeightError(f"tensor {own!r} is stored as {entry.type_name}, which can't be read: {error}") from error


def uninterleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the order in which GGUF's llama architecture stores q and k: rotary pairs side by side.

    Args:
        tensor: (heads * head size, in), or (heads * head size,) for a bias.
    """
    rest = tensor.shape[1:]
    return tensor.view(heads, -1, 2, *rest).transpose(1, 2).reshape(tensor.shape[0], *rest)


@contextmanager
def open_weights(
    path: Path, map_gguf: Callable[[GgufFile], tuple[dict[str, str], dict[str, int]]]
) -> Iterator[Weights]:
    """Open a folder or GGUF file for reading.

    Args:
        map_gguf: gives the names and interleaved heads of a GGUF file, see `GgufWeights`.
    """
    if path.is_dir():
        yield SafetensorsWeights(path)
        return
    with GgufFile(path) as file:
        yield GgufWeights(file, *map_gguf(file))
