"""Reads the tensors of one model while it is built."""

from __future__ import annotations

from collections.abc import Callable

import torch

from servekit.engine.linear import Linear, LinearFactory
from servekit.models.weights import WeightError, Weights


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
            WeightError: it is missing, or has another shape.
        """
        tensor = self._weights.get(self._prefix + name)
        if tuple(tensor.shape) != shape:
            raise WeightError(f"tensor {name!r} has the shape {tuple(tensor.shape)}, expected {shape}")
        self._done += 1
        self._progress(self._done, len(self._weights.names))
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
        tensors = [self.tensor(f"{at}{name}.weight", n, width) for name, n in rows.items()]
        weight = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        bias = None
        if biased or any(self.has(f"{at}{name}.bias") for name in rows):
            bias = torch.cat([self._bias(f"{at}{name}.bias", n, biased) for name, n in rows.items()])
        return self._linear(weight, bias)

    def finish(self) -> None:
        """Fill the progress bar, whatever the weights hold beside what the model needs."""
        if self._done < len(self._weights.names):
            self._progress(len(self._weights.names), len(self._weights.names))

    def _bias(self, name: str, rows: int, needed: bool) -> torch.Tensor:
        if needed or self.has(name):
            return self.tensor(name, rows)
        return torch.zeros(rows, device=self._device, dtype=self._dtype)
