"""Qwen 3's mixtures of experts: Qwen 3's attention, and experts in most layers (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from servekit.models.decoder import DecoderConfig, Family
from servekit.models.families.qwen3 import GGUF_NORMS, Qwen3Layer
from servekit.models.gguf_file import GgufFile
from servekit.models.layers import MixtureOfExperts
from servekit.models.split import ModelSizes
from servekit.models.tensor_loader import TensorLoader
from servekit.models.weights import GgufSource, WeightError


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """What a mixture adds.

    Attributes:
        experts: how many a layer has.
        used: how many a token goes through.
        expert_intermediate: width inside one.
        normalize: whether the weights of a token's experts add up to 1.
        sparse: of each layer whether it has experts; the others have one network for all tokens.
    """

    experts: int
    used: int
    expert_intermediate: int
    normalize: bool
    sparse: tuple[bool, ...]

    def __post_init__(self) -> None:
        # super() does not find its way in a class with slots that a decorator has made anew.
        DecoderConfig.__post_init__(self)
        if not 1 <= self.used <= self.experts or self.expert_intermediate < 1:
            raise WeightError(
                f"impossible sizes: {self.used} of {self.experts} experts of {self.expert_intermediate} for each token"
            )

    def sizes(self) -> ModelSizes:
        """What ranks can split."""
        dense = 0 if all(self.sparse) else self.intermediate
        shared = DecoderConfig.sizes(self)._replace(dense_width=dense)
        return shared._replace(experts=self.experts, expert_width=self.expert_intermediate)

    def linear_shapes(self) -> list[tuple[int, int]]:
        """Shapes (out, in) of the matrices that a token meets in one layer with experts."""
        attention = DecoderConfig.linear_shapes(self)[:2]
        expert = [(2 * self.expert_intermediate, self.hidden), (self.hidden, self.expert_intermediate)]
        return attention + expert * self.used


class Qwen3MoeLayer(Qwen3Layer):
    """Of experts, where the configuration says so."""

    def feed_forward(self, config: DecoderConfig, index: int, load: TensorLoader, at: str) -> nn.Module:
        if not isinstance(config, Qwen3MoeConfig) or not config.sparse[index]:
            return super().feed_forward(config, index, load, at)
        return MixtureOfExperts(
            load, at, config.hidden, config.expert_intermediate, config.experts, config.used, config.normalize
        )


def _from_hf(config: dict[str, Any]) -> DecoderConfig:
    layers, experts = config["num_hidden_layers"], config.get("num_experts") or config["num_local_experts"]
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return Qwen3MoeConfig.from_hf(
        config,
        windows=() if window is None else (window,) * layers,
        experts=experts,
        used=config.get("num_experts_per_tok", 8),
        expert_intermediate=config.get("moe_intermediate_size", 768),
        normalize=config.get("norm_topk_prob", False),
        sparse=tuple(i not in dense and (i + 1) % every == 0 for i in range(layers)),
    )


def _from_gguf(file: GgufFile) -> DecoderConfig:
    m = file.metadata
    return Qwen3MoeConfig.from_gguf(
        file,
        experts=m["qwen3moe.expert_count"],
        used=m["qwen3moe.expert_used_count"],
        expert_intermediate=m["qwen3moe.expert_feed_forward_length"],
        normalize=m.get("qwen3moe.expert_weights_norm", True),
        sparse=(True,) * m["qwen3moe.block_count"],
    )


def _gguf_layer(config: Qwen3MoeConfig) -> dict[str, GgufSource]:
    """All experts of a layer lie in one tensor, one behind the other."""
    experts = {
        f"mlp.experts.{expert}.{kind}_proj": GgufSource(f"ffn_{kind}_exps", part=expert)
        for expert in range(config.experts)
        for kind in ("gate", "up", "down")
    }
    return GGUF_NORMS | experts | {"mlp.gate": GgufSource("ffn_gate_inp")}


FAMILY = Family(
    architectures=("Qwen3MoeForCausalLM",),
    from_hf=_from_hf,
    gguf=("qwen3moe",),
    from_gguf=_from_gguf,
    gguf_layer=_gguf_layer,
    layer=Qwen3MoeLayer,
)
