"""Layers that model families share. Activations are [tokens, width]; tokens of all sequences lie side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from servekit.engine import native
from servekit.models.grouped_experts import group
from servekit.models.tensor_loader import TensorLoader


class RMSNorm(nn.Module):  # type: ignore[misc]
    """x / rms(x) * weight over the last axis, computed in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        if native.serves(x):
            return native.rms_norm(x, self.weight, self.eps)
        # On a CPU rms_norm is a chain of full-sized temporaries; this has one.
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        return (x * scale).mul_(self.weight)


def add_(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add y to x in place; returns x."""
    # Torch would wake its threads for it, which takes longer than the sum.
    return native.add_(x, y) if native.serves(x) and y.is_contiguous() else x.add_(y)


class GatedFeedForward(nn.Module):  # type: ignore[misc]
    """silu(gate(x)) * up(x), projected back (https://arxiv.org/abs/2002.05202).

    Args:
        load: reads the tensors.
        at: what stands before their names.
        hidden, intermediate: widths outside and inside.
    """

    def __init__(self, load: TensorLoader, at: str, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up = load.linear(at, {"gate_proj": intermediate, "up_proj": intermediate}, hidden)
        self.down = load.linear(at, {"down_proj": hidden}, intermediate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        if native.serves(both):
            return self.down(native.silu_mul(both))
        gate, up = both.chunk(2, -1)
        return self.down(F.silu(gate).mul_(up))


class MixtureOfExperts(nn.Module):  # type: ignore[misc]
    """Many small feed-forward networks; a router sends each token through a few of them (https://arxiv.org/abs/1701.06538).

    Args:
        load: reads the tensors.
        at: what stands before their names.
        hidden, intermediate: widths outside and inside one expert.
        experts: how many there are.
        used: how many a token goes through.
        normalize: whether the weights of these add up to 1.
    """

    def __init__(
        self, load: TensorLoader, at: str, hidden: int, intermediate: int, experts: int, used: int, normalize: bool
    ) -> None:
        super().__init__()
        self._used, self._normalize = used, normalize
        self.router = load.linear(at, {"gate": experts}, hidden)
        each = [GatedFeedForward(load, f"{at}experts.{expert}.", hidden, intermediate) for expert in range(experts)]
        self.grouped = group([(expert.gate_up, expert.down) for expert in each])
        self.experts = nn.ModuleList(each if self.grouped is None else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1, dtype=torch.float32).topk(self._used, -1)
        if self._normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.grouped is not None:
            return self.grouped(x, weights, chosen)
        weights, chosen = weights.to(x.dtype).flatten(), chosen.flatten()
        by_expert = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self.experts)).tolist()
        out = torch.zeros_like(x)
        # A token's experts are added in their order, whatever other tokens there are: so they can't change its sum.
        for expert, mine in zip(self.experts, by_expert.split(counts), strict=True):
            if len(mine):
                tokens = mine // self._used
                out.index_add_(0, tokens, expert(x[tokens]).mul_(weights[mine, None]))
        return out
