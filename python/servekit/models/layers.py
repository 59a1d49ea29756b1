"""Layers that model families share. Activations are [tokens, width]; tokens of all sequences lie side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):  # type: ignore[misc]
    """x / rms(x) * weight, computed in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # On a CPU rms_norm is a chain of full-sized temporaries; this has one.
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        return (x * scale).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    Attributes:
        type: linear or llama3.
        factor: how much longer.
        low_freq_factor, high_freq_factor, original_context: of llama3, which leaves high frequencies as they are.
    """

    type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


def rope_frequencies(
    head_size: int, base: float, scaling: RopeScaling | None = None, divisors: torch.Tensor | None = None
) -> torch.Tensor:
    """Radians a position, [head size / 2] float32.

    Args:
        divisors: [head size / 2], as a GGUF file brings them in place of a llama3 scaling.

    Raises:
        ValueError: an unknown scaling.
    """
    frequencies = 1.0 / base ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    if divisors is not None:
        return frequencies / divisors.float()
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type == "llama3":
        wavelength = 2 * math.pi / frequencies
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)
        return frequencies * keep + frequencies / scaling.factor * (1 - keep)
    raise ValueError(f"rope scaling {scaling.type!r} is not known; known are linear and llama3")


class Rope(nn.Module):  # type: ignore[misc]
    """Rotary positions, halves rotated against each other (https://arxiv.org/abs/2104.09864)."""

    def __init__(self, frequencies: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", frequencies, persistent=False)
        self._dtype = dtype

    def table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine of [tokens] positions, each [tokens, 1, head size]; one table serves all layers."""
        angles = positions.float()[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), -1)[:, None].to(self._dtype),
            torch.cat((-sin, sin), -1)[:, None].to(self._dtype),
        )


def rotate_(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Apply a rotary table in place to x of shape [tokens, heads, head size]."""
    cos, sin = table
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)
