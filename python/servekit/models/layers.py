"""Layers that model families share. Activations are [tokens, width]; tokens of all sequences lie side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from servekit.engine.linear import Linear


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


class GatedFfn:
    """down(silu(gate(x)) * up(x)), gate and up in one matrix.

    Args:
        gate_up: to twice the inner width.
        down: back.
    """

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up))
