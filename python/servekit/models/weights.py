"""Where weights come from: a folder of safetensors files, or one GGUF file. Names are Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from servekit.engine.native import Stored
from servekit.models.dequantize import dequantize
from servekit.models.gguf_file import GgufFile, GgufTensor
from servekit.models.split import Span


class WeightError(ValueError):
    """Weights that are missing, incomplete or of an unknown kind. One line for the operator."""


class Weights(Protocol):
    """Named tensors, read when asked for. Spans say which part of each axis is read; none stand for all of it."""

    names: frozenset[str]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor, (out, in) for matrices.

        Raises:
            WeightError: there is none of this name.
        """

    def get(self, name: str, spans: Sequence[Span] = ()) -> torch.Tensor:
        """A tensor, or a part of it.

        Raises:
            WeightError: there is none of this name, or it can't be read.
        """

    def stored(self, name: str, spans: Sequence[Span] = ()) -> Stored | None:
        """A matrix as the file stores it, None if there is none of this name or no kernel for it."""


class SafetensorsWeights:
    """A folder of safetensors files, with or without an index, memory-mapped.

    Raises:
        WeightError: there is none, or one that is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file_of = _read_index(folder)
            opened: dict[str, Any] = {
                name: safe_open(str(folder / name), framework="pt")
                for name in sorted(set(file_of.values()) or _without_index(folder))
            }
        except (OSError, SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
            if isinstance(error, WeightError):
                raise
            raise WeightError(f"weights in {folder} can't be read: {error}") from error
        held = {name: frozenset(file.keys()) for name, file in opened.items()}
        for tensor, file in file_of.items():
            if tensor not in held[file]:
                raise WeightError(f"{folder}: the index places tensor {tensor!r} in {file}, which lacks it")
        self._file_of = {tensor: opened[name] for name, tensors in held.items() for tensor in tensors}
        self.names = frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._file_of:
            raise WeightError(f"the weights lack the tensor {name!r}")
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def get(self, name: str, spans: Sequence[Span] = ()) -> torch.Tensor:
        if name not in self._file_of:
            raise WeightError(f"the weights lack the tensor {name!r}")
        if all(span.whole for span in spans):
            tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        else:
            # Of what is cut off no byte is read.
            tensor = self._file_of[name].get_slice(name)[tuple(slice(span.start, span.stop) for span in spans)]
        return tensor

    def stored(self, name: str, spans: Sequence[Span] = ()) -> Stored | None:
        if name not in self.names or len(self.shape(name)) != 2:
            return None
        return Stored.of(self.get(name, spans))


def _read_index(folder: Path) -> dict[str, str]:
    """Which file holds each tensor; nothing where there is no index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return {}
    file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
    for name in file_of.values():
        if Path(name).name != name:
            raise WeightError(f"{index} names a file outside its folder: {name!r}")
    return file_of


def _without_index(folder: Path) -> list[str]:
    # Some folders keep a second copy of the weights under another name.
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    files = [path.name for path in folder.glob("*.safetensors")]
    if not files:
        raise WeightError(f"{folder} holds no .safetensors file")
    return files


class GgufSource(NamedTuple):
    """Where a tensor is in a GGUF file.

    Attributes:
        tensor: the file's name for it.
        interleaved_heads: how many heads it has if its rotary pairs lie side by side, else 0.
        part: which one along the outermost axis it is, None if it is all.
    """

    tensor: str
    interleaved_heads: int = 0
    part: int | None = None

    def heads(self, spans: Sequence[Span]) -> int:
        """How many of the interleaved heads are in some spans of it."""
        return self.interleaved_heads * spans[0].count // spans[0].total if spans else self.interleaved_heads


class GgufWeights:
    """One GGUF file; quantized tensors come as float32.

    Args:
        file: the open file.
        sources: where Hugging Face's tensors are; those that the file does not have are left out.
    """

    def __init__(self, file: GgufFile, sources: dict[str, GgufSource]) -> None:
        self._file = file
        self._sources = sources
        self.names = frozenset(name for name, source in sources.items() if source.tensor in file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def get(self, name: str, spans: Sequence[Span] = ()) -> torch.Tensor:
        entry, source = self._entry(name), self._sources[name]
        entry = entry.rows(spans[0].start, spans[0].stop) if spans else entry
        try:
            tensor = dequantize(entry)
        except (NotImplementedError, ValueError) as error:
            raise WeightError(
                f"tensor {entry.name!r} is stored as {entry.type_name}, which can't be read: {error}"
            ) from error
        tensor = uninterleave(tensor, source.heads(spans)) if source.interleaved_heads else tensor
        return tensor[:, spans[1].start : spans[1].stop] if len(spans) > 1 else tensor

    def stored(self, name: str, spans: Sequence[Span] = ()) -> Stored | None:
        if name not in self.names:
            return None
        entry, source = self._entry(name), self._sources[name]
        if len(entry.shape) != 2 or not Stored.known(entry.type_name, entry.shape[1]):
            return None
        entry = entry.rows(spans[0].start, spans[0].stop) if spans else entry
        # A copy: the file is closed when the model is built.
        data = torch.from_numpy(np.frombuffer(entry.data, np.uint8).copy()).view(entry.shape[0], -1)
        if source.interleaved_heads:
            data = uninterleave(data, source.heads(spans))
        whole = Stored(entry.type_name, data, entry.shape[1])
        return whole.columns(spans[1].start, spans[1].stop) if len(spans) > 1 else whole

    def _entry(self, name: str) -> GgufTensor:
        if name not in self.names:
            own = self._sources[name].tensor if name in self._sources else name
            raise WeightError(f"the weights lack the tensor {own!r}")
        source = self._sources[name]
        entry = self._file.tensors[source.tensor]
        try:
            return entry if source.part is None else entry.part(source.part)
        except ValueError as error:
            raise WeightError(f"tensor {entry.name!r} can't be read: {error}") from error


def uninterleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the order in which GGUF's llama architecture stores q and k: rotary pairs side by side.

    Args:
        tensor: (heads * head size, in), or (heads * head size,) for a bias.
    """
    rest = tensor.shape[1:]
    return tensor.view(heads, -1, 2, *rest).transpose(1, 2).reshape(tensor.shape[0], *rest)


@contextmanager
def open_weights(path: Path, sources: dict[str, GgufSource]) -> Iterator[Weights]:
    """Open a folder or GGUF file for reading.

    Args:
        path: the folder or file.
        sources: where each tensor is in a GGUF file.
    """
    if path.is_dir():
        yield SafetensorsWeights(path)
        return
    with GgufFile(path) as file:
        yield GgufWeights(file, sources)
