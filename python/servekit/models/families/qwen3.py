"""Qwen 3: queries and keys are normalized head by head (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from typing import Any

from servekit.models.decoder import DecoderConfig, DecoderLayer, Family, SelfAttention
from servekit.models.families.qwen2 import read_windows
from servekit.models.weights import GgufSource

GGUF_NORMS = {
    "self_attn.q_norm": GgufSource("attn_q_norm"),
    "self_attn.k_norm": GgufSource("attn_k_norm"),
}


class Qwen3Attention(SelfAttention):
    """With norms."""

    heads_normed = True


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
