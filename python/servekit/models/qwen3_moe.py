"""Qwen3-MoE: Qwen3 with a mixture of experts in place of some feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from servekit.models.family import Family, windows_of
from servekit.models.layers import GatedFfn
from servekit.models.llama import Experts, LlamaConfig
from servekit.models.qwen3 import Qwen3Layer
from servekit.models.tensor_loader import TensorLoader
from servekit.models.weights import WeightError


class Mixture:
    """Sends each token to the experts that the router likes best, and adds up what they say.

    Args:
        router: [experts, hidden].
        experts: all of them.
        used: how many for each token.
        normalized: their weights are made to sum up to 1.
    """

    def __init__(self, router: torch.Tensor, experts: list[GatedFfn], used: int, normalized: bool) -> None:
        self._router, self._experts, self._used, self._normalized = router, experts, used, normalized

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = F.linear(x, self._router).float().softmax(-1).topk(self._used, -1)
        if self._normalized:
            weights /= weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, rows, self._experts[expert](x[rows]) * weights[rows, place, None].to(x.dtype))
        return out


class Qwen3MoeLayer(Qwen3Layer):
    """A layer whose feed-forward network may be a mixture."""

    def make_ffn(self, config: LlamaConfig, load: TensorLoader, at: str) -> Callable[[torch.Tensor], torch.Tensor]:
        experts = config.experts
        if experts is None or self._index not in experts.layers:
            return super().make_ffn(config, load, at)
        networks = []
        for i in range(experts.count):
            one = f"{at}mlp.experts.{i}."
            networks.append(GatedFfn(load.linear(one + "gate_proj", one + "up_proj"), load.linear(one + "down_proj")))
        return Mixture(load.tensor(at + "mlp.gate.weight"), networks, experts.used, experts.normalized)

    @staticmethod
    def shapes(config: LlamaConfig, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from Qwen3Layer.shapes(config, index)
        experts = config.experts
        if experts is None or index not in experts.layers:
            return
        yield "mlp.gate.weight", (experts.count, config.hidden)
        for i in range(experts.count):
            yield f"mlp.experts.{i}.gate_proj.weight", (experts.intermediate, config.hidden)
            yield f"mlp.experts.{i}.up_proj.weight", (experts.intermediate, config.hidden)
            yield f"mlp.experts.{i}.down_proj.weight", (config.hidden, experts.intermediate)


def _read(config: dict[str, Any]) -> LlamaConfig:
    made = LlamaConfig.from_hf(config)
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
    try:
        experts = Experts(
            count=config["num_experts"],
            used=config["num_experts_per_tok"],
            intermediate=config["moe_intermediate_size"],
            normalized=config.get("norm_topk_prob", False),
            layers=frozenset(i for i in range(made.layers) if i not in dense and (i + 1) % step == 0),
        )
    except KeyError as error:
        raise WeightError(f"config.json lacks {error}") from None
    if not 1 <= experts.used <= experts.count:
        raise WeightError(f"impossible sizes: {experts.used} of {experts.count} experts for each token")
    windows = windows_of(config, made.layers) if config.get("use_sliding_window") else ()
    return replace(made, experts=experts, windows=windows)


QWEN3_MOE = Family("Qwen3MoeForCausalLM", _read, Qwen3MoeLayer)
