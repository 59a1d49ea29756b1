"""All experts of a layer in two products, for devices that the host must not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from servekit.engine.linear import DenseLinear, Linear

_ALIGNMENT = 8
"""Widths are multiples of it, or CUDA's kernel reads across 16 bytes."""


class GroupedExperts(nn.Module):  # type: ignore[misc]
    """Gated feed-forward networks of one size, as `GatedFeedForward`, behind each other in memory.

    Which token goes to which of them is known on the device alone: tokens are sorted there by their experts, and one
    call multiplies each group with its own matrix.

    Args:
        gate_up: [experts, 2 * intermediate, hidden].
        down: [experts, hidden, intermediate].
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What a token's experts make of it, summed up in the order in which they were chosen.

        Args:
            x: [tokens, hidden].
            weights, chosen: [tokens, used] how much each expert counts, and which it is.
        """
        used, flat = chosen.shape[1], chosen.flatten()
        order = flat.argsort(stable=True)
        every = torch.arange(len(self.down), device=x.device)
        ends = torch.searchsorted(flat[order], every, right=True).to(torch.int32)
        both = F.grouped_mm(x[order // used], self.gate_up.transpose(1, 2), offs=ends)
        gate, up = both.chunk(2, -1)
        out = F.grouped_mm(F.silu(gate).mul_(up), self.down.transpose(1, 2), offs=ends)
        back = torch.empty_like(out)
        back[order] = out
        return (back.view(*chosen.shape, -1) * weights.to(x.dtype)[..., None]).sum(1)


def group(layers: Sequence[tuple[Linear, Linear]]) -> GroupedExperts | None:
    """Experts as one, where the device has a kernel for that: bfloat16 on CUDA, from Hopper on.

    Args:
        layers: of each expert, gate and up in one, and down.
    """
    pairs = [(a, b) for a, b in layers if isinstance(a, DenseLinear) and isinstance(b, DenseLinear)]
    weight = pairs[0][1].weight if len(pairs) == len(layers) else None
    if weight is None or weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return None
    if torch.cuda.get_device_capability(weight.device) < (9, 0) or any(n % _ALIGNMENT for n in weight.shape):
        return None
    if any(linear.bias is not None for pair in pairs for linear in pair):
        return None
    return GroupedExperts(torch.stack([a.weight for a, _ in pairs]), torch.stack([b.weight for _, b in pairs]))
