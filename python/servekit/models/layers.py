"""Layers that model families share. Activations are [tokens, width]; tokens of all sequences lie side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from servekit.engine import native
from servekit.models.grouped_experts import group
from servekit.models.split import Span
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


class Embedding(nn.Module):  # type: ignore[misc]
    """A vector for each token.

    Args:
        load: reads the tensor.
        name: of the tensor.
        size: of the vectors.
        rows: tokens whose vectors this rank holds.
    """

    def __init__(self, load: TensorLoader, name: str, rows: Span, size: int) -> None:
        super().__init__()
        self.weight = load.tensor(name, rows, size)
        self._rows, self._group = rows, None if rows.whole else load.group

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Vectors of tokens, [tokens, size]."""
        if self._group is None:
            return F.embedding(ids, self.weight)
        # Each rank knows some tokens; the others' vectors are zeros in its part of the sum.
        known = (ids >= self._rows.start) & (ids < self._rows.stop)
        x = F.embedding((ids - self._rows.start).masked_fill_(~known, 0), self.weight)
        return self._group.sum_(x.masked_fill_(~known[:, None], 0))


class GatedFeedForward(nn.Module):  # type: ignore[misc]
    """silu(gate(x)) * up(x), projected back (https://arxiv.org/abs/2002.05202).

    Args:
        load: reads the tensors.
        at: what stands before their names.
        hidden, intermediate: widths outside and inside; of the latter, what this rank holds.
        summed: the ranks' parts of the output are added up; else the caller does it.
    """

    def __init__(self, load: TensorLoader, at: str, hidden: int, intermediate: Span, summed: bool = True) -> None:
        super().__init__()
        self.gate_up = load.linear(at, {"gate_proj": intermediate, "up_proj": intermediate}, hidden)
        self.down = load.linear(at, {"down_proj": hidden}, intermediate, summed=summed)

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
        self._used, self._normalize, self._total = used, normalize, experts
        self.router = load.linear(at, {"gate": experts}, hidden)
        self._mine, self._tokens, self._group = load.cut.experts.span(experts), load.cut.tokens, load.group
        width = load.cut.within.span(intermediate)
        each = [
            GatedFeedForward(load, f"{at}experts.{expert}.", hidden, width, summed=False)
            for expert in range(self._mine.start, self._mine.stop)
        ]
        alone = load.group is None
        self.grouped = group([(expert.gate_up, expert.down) for expert in each]) if alone else None
        self.experts = nn.ModuleList(each if self.grouped is None else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.grouped is not None:
            weights, chosen = self._choose(x)
            return self.grouped(x, weights, chosen)
        out = torch.zeros_like(x)
        mine = self._tokens.span(len(x))
        self._add_experts(x[mine.start : mine.stop], out[mine.start : mine.stop])
        # Whatever was split, tokens, experts or their widths, each rank has a part of one sum.
        return out if self._group is None else self._group.sum_(out)

    def _choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token, how much its experts count and which they are: both [tokens, used]."""
        weights, chosen = self.router(x).softmax(-1, dtype=torch.float32).topk(self._used, -1)
        if self._normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def _add_experts(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to `out` what this rank's experts make of its tokens."""
        weights, chosen = self._choose(x)
        weights, chosen = weights.to(x.dtype).flatten(), chosen.flatten()
        by_expert = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self._total).tolist()
        pieces = by_expert.split(counts)[self._mine.start : self._mine.stop]
        # A token's experts are added in their order, whatever other tokens there are: so they can't change its sum.
        for expert, piece in zip(self.experts, pieces, strict=True):
            if len(piece):
                tokens = piece // self._used
                out.index_add_(0, tokens, expert(x[tokens]).mul_(weights[piece, None]))
