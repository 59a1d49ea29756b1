"""Reads the tensors of one model while it is built, or of a rank's part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from servekit.engine.linear import Linear, LinearFactory, NativeLayers
from servekit.engine.native import Stored
from servekit.models.split import Cut, Span
from servekit.models.weights import WeightError, Weights

if TYPE_CHECKING:
    from servekit.engine.group import StageGroup

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Summed:
    """A layer whose inputs are split over the ranks of a stage: their products are added up."""

    __slots__ = ("_group", "_linear")

    def __init__(self, linear: Linear, group: StageGroup) -> None:
        self._linear, self._group = linear, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.sum_(self._linear(x))


class TensorLoader:
    """Reads a model's tensors, checks their shapes and counts them for the progress bar.

    Sizes are whole ones, as an int, or what this rank holds of them, as a `Span`.

    Args:
        weights: where they come from.
        linear: makes the linear layers.
        dtype, device: of what is made.
        progress: called with (tensors done, tensors in all).
        prefix: stands before every name in the weights.
        cut: this rank's part of the model; None is all of it.
        group: the ranks of its stage, None where it is alone.
    """

    def __init__(
        self,
        weights: Weights,
        linear: LinearFactory,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None],
        prefix: str = "",
        cut: Cut | None = None,
        group: StageGroup | None = None,
    ) -> None:
        self.cut, self.group = cut or Cut(range(0)), group
        self._weights, self._linear, self._progress = weights, linear, progress
        self._dtype, self._device, self._prefix = dtype, device, prefix
        self._done = 0

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return self._prefix + name in self._weights.names

    def tensor(self, name: str, *shape: int | Span) -> torch.Tensor:
        """A tensor of the expected shape, or this rank's part of one.

        Raises:
            WeightError: it is missing, or has another shape, or is quantized in a way that only its maker knows.
        """
        spans = [_span(size) for size in shape]
        found, expected = self._weights.shape(self._prefix + name), tuple(span.total for span in spans)
        if found != expected:
            raise WeightError(f"tensor {name!r} has the shape {found}, expected {expected}")
        tensor = self._weights.get(self._prefix + name, spans)
        if tensor.dtype not in _DTYPES:
            raise WeightError(f"tensor {name!r} is of {tensor.dtype}; known are {', '.join(map(str, _DTYPES))}")
        self._count(1)
        return tensor.to(self._device, self._dtype)

    def linear(
        self,
        at: str,
        rows: dict[str, int | Span],
        width: int | Span,
        *,
        biased: bool = False,
        summed: bool = True,
        bias_here: bool = True,
    ) -> Linear:
        """One layer over the outputs of several matrices, one after the other.

        Args:
            at: what stands before their names.
            rows: name and number of outputs of each.
            width: their number of inputs; where the rank holds a part of them, the stage's products are added up.
            biased: every one has a bias; else each that the weights have is taken.
            summed: adding up is left to the caller if not.
            bias_here: another rank has the bias if not.

        Raises:
            WeightError: a tensor is missing, or has another shape.
        """
        inputs = _span(width)
        bias = None
        # Of products that are added up one has the bias.
        if bias_here and inputs.start == 0 and (biased or any(self.has(f"{at}{name}.bias") for name in rows)):
            bias = torch.cat([self._bias(f"{at}{name}.bias", n, biased) for name, n in rows.items()])
        linear = self._linear_of({f"{at}{name}.weight": n for name, n in rows.items()}, inputs, bias)
        return linear if inputs.whole or not summed or self.group is None else Summed(linear, self.group)

    def _linear_of(self, rows: dict[str, int | Span], width: Span, bias: torch.Tensor | None) -> Linear:
        if isinstance(self._linear, NativeLayers):
            parts = [self._stored(name, _span(n), width) for name, n in rows.items()]
            found = [part for part in parts if part is not None]
            if len(found) == len(parts):
                self._count(len(parts))
                return self._linear.stored(found, bias)
        tensors = [self.tensor(name, n, width) for name, n in rows.items()]
        return self._linear(torch.cat(tensors) if len(tensors) > 1 else tensors[0], bias)

    def tied(self, name: str, rows: int | Span, weight: torch.Tensor) -> Linear:
        """A layer over a tensor that was read before, `rows` of it, without a bias."""
        if isinstance(self._linear, NativeLayers):
            part = self._stored(name, _span(rows), _span(weight.shape[1]))
            if part is not None:
                return self._linear.stored([part], None)
        return self._linear(weight, None)

    def _stored(self, name: str, rows: Span, width: Span) -> Stored | None:
        """A matrix as it is stored, None if there is no kernel for that or it is not what was expected."""
        name = self._prefix + name
        if name not in self._weights.names or self._weights.shape(name) != (rows.total, width.total):
            return None
        return self._weights.stored(name, (rows, width))

    def _count(self, tensors: int) -> None:
        self._done += tensors
        self._progress(self._done, len(self._weights.names))

    def finish(self) -> None:
        """Fill the progress bar, whatever the weights hold beside what the model needs."""
        if self._done < len(self._weights.names):
            self._progress(len(self._weights.names), len(self._weights.names))

    def _bias(self, name: str, rows: int | Span, needed: bool) -> torch.Tensor:
        if needed or self.has(name):
            return self.tensor(name, rows)
        return torch.zeros(_span(rows).count, device=self._device, dtype=self._dtype)


def _span(size: int | Span) -> Span:
    return Span(0, size, size) if isinstance(size, int) else size
