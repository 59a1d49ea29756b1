"""Reads the tensors of one model while it is built."""

from __future__ import annotations

from collections.abc import Callable

import torch

from servekit.engine.linear import Linear, LinearFactory, NativeLayers
from servekit.engine.native import Stored
from servekit.models.weights import WeightError, Weights

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class TensorLoader:
    """Reads a model's tensors, checks their shapes and counts them for the progress bar.

    Args:
        weights: where they come from.
        linear: makes the linear layers.
        dtype, device: of what is made.
        progress: called with (tensors done, tensors in all).
        prefix: stands before every name in the weights.
    """

    def __init__(
        self,
        weights: Weights,
        linear: LinearFactory,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None],
        prefix: str = "",
    ) -> None:
        self._weights, self._linear, self._progress = weights, linear, progress
        self._dtype, self._device, self._prefix = dtype, device, prefix
        self._done = 0

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return self._prefix + name in self._weights.names

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of the expected shape.

        Raises:
            WeightError: it is missing, or has another shape, or is quantized in a way that only its maker knows.
        """
        tensor = self._weights.get(self._prefix + name)
        if tensor.dtype not in _DTYPES:
            raise WeightError(f"tensor {name!r} is of {tensor.dtype}; known are {', '.join(map(str, _DTYPES))}")
        if tuple(tensor.shape) != shape:
            raise WeightError(f"tensor {name!r} has the shape {tuple(tensor.shape)}, expected {shape}")
        self._count(1)
        return tensor.to(self._device, self._dtype)

    def linear(self, at: str, rows: dict[str, int], width: int, *, biased: bool = False) -> Linear:
        """One layer over the outputs of several matrices, one after the other.

        Args:
            at: what stands before their names.
            rows: name and number of outputs of each.
            width: their number of inputs.
            biased: every one has a bias; else each that the weights have is taken.

        Raises:
            WeightError: a tensor is missing, or has another shape.
        """
        bias = None
        if biased or any(self.has(f"{at}{name}.bias") for name in rows):
            bias = torch.cat([self._bias(f"{at}{name}.bias", n, biased) for name, n in rows.items()])
        if isinstance(self._linear, NativeLayers):
            parts = [self._stored(f"{at}{name}.weight", n, width) for name, n in rows.items()]
            found = [part for part in parts if part is not None]
            if len(found) == len(parts):
                self._count(len(parts))
                return self._linear.stored(found, bias)
        tensors = [self.tensor(f"{at}{name}.weight", n, width) for name, n in rows.items()]
        return self._linear(torch.cat(tensors) if len(tensors) > 1 else tensors[0], bias)

    def tied(self, name: str, weight: torch.Tensor) -> Linear:
        """A layer over a tensor that was read before, without a bias."""
        if isinstance(self._linear, NativeLayers) and (part := self._stored(name, *weight.shape)) is not None:
            return self._linear.stored([part], None)
        return self._linear(weight, None)

    def _stored(self, name: str, rows: int, width: int) -> Stored | None:
        """A matrix as it is stored, None if there is no kernel for that or it is not what was expected."""
        found = self._weights.stored(self._prefix + name)
        fits = found is not None and (found.data.shape[0], found.width) == (rows, width)
        return found if fits else None

    def _count(self, tensors: int) -> None:
        self._done += tensors
        self._progress(self._done, len(self._weights.names))

    def finish(self) -> None:
        """Fill the progress bar, whatever the weights hold beside what the model needs."""
        if self._done < len(self._weights.names):
            self._progress(len(self._weights.names), len(self._weights.names))

    def _bias(self, name: str, rows: int, needed: bool) -> torch.Tensor:
        if needed or self.has(name):
            return self.tensor(name, rows)
        return torch.zeros(rows, device=self._device, dtype=self._dtype)
