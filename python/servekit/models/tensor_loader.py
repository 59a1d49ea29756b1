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
        shapes: name to shape of every tensor that the model needs; biases of linear layers are optional.
        linear: makes the linear layers.
        dtype, device: of what is made.
        progress: called with (tensors done, tensors in all).
        prefix: stands before every name in the weights.
        absent: how many of the shapes will not be asked for.
    """

    def __init__(
        self,
        weights: Weights,
        shapes: dict[str, tuple[int, ...]],
        linear: LinearFactory,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None],
        prefix: str = "",
        absent: int = 0,
    ) -> None:
        self._weights, self._linear, self._progress = weights, linear, progress
        self._dtype, self._device = dtype, device
        self._shapes, self._prefix = shapes, prefix
        self._done, self._total = 0, len(shapes) - absent

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the expected shape.

        Raises:
            WeightError: it is missing, or has another shape.
        """
        tensor = self._weights.get(self._prefix + name)
        if tuple(tensor.shape) != self._shapes[name]:
            raise WeightError(f"tensor {name!r} has the shape {tuple(tensor.shape)}, expected {self._shapes[name]}")
        self._done += 1
        self._progress(self._done, self._total)
        return tensor.to(self._device, self._dtype)

    def linear(self, *names: str) -> Linear:
        """One layer over the outputs of all, one after the other."""
        tensors = [self.tensor(f"{name}.weight") for name in names]
        weight = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        biased = [f"{self._prefix}{name}.bias" in self._weights.names for name in names]
        bias = None
        if any(biased):
            bias = torch.cat(
                [
                    self._weights.get(f"{self._prefix}{name}.bias").to(self._device, self._dtype)
                    if has
                    else torch.zeros(tensor.shape[0], device=self._device, dtype=self._dtype)
                    for name, has, tensor in zip(names, biased, tensors, strict=True)
                ]
            )
        return self._linear(weight, bias)
