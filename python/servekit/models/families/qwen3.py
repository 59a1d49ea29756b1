"""Qwen 3: queries and keys are normalized head by head (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from typing import Any

import torch

from servekit.models.decoder import DecoderConfig, DecoderLayer, Family, SelfAttention
from servekit.models.families.qwen2 import read_windows
from servekit.models.layers import RMSNorm
from servekit.models.tensor_loader import TensorLoader
from servekit.models.weights import GgufSource

GGUF_NORMS = {
    "self_attn.q_norm": GgufSource("attn_q_norm"),
    "self_attn.k_norm": GgufSource("attn_k_norm"),
}


class Qwen3Attention(SelfAttention):
    """With norms."""

    def __init__(self, config: DecoderConfig, index: int, load: TensorLoader, at: str) -> None:
        super().__init__(config, index, load, at)
        self.q_norm = RMSNorm(load.tensor(at + "q_norm.weight", config.head_size), config.norm_eps)
        self.k_norm = RMSNorm(load.tensor(at + "k_norm.weight", config.head_size), config.norm_eps)

    def prepare_(self, qkv: torch.Tensor) -> None:
        q, k, _ = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        q.copy_(self.q_norm(q))
        k.copy_(self.k_norm(k))


class Qwen3Layer(DecoderLayer):
    """Of this attention."""

    attention = Qwen3Attention


def _from_hf(config: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig.from_hf(config, windows=read_windows(config), head_size=config.get("head_dim") or 128)


FAMILY = Family(
    architectures=("Qwen3ForCausalLM",),
    from_hf=_from_hf,
    gguf=("qwen3",),
    gguf_layer=lambda config: GGUF_NORMS,
    layer=Qwen3Layer,
)
