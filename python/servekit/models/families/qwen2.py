"""Qwen 2 and 2.5: queries, keys and values have biases, upper layers may see a window (https://arxiv.org/abs/2407.10671)."""

from __future__ import annotations

from typing import Any

from servekit.models.decoder import DecoderConfig, DecoderLayer, Family, SelfAttention


def read_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """Windows of the layers, as `config.json` of Qwen's models from 2 on says."""
    window, layers = config.get("sliding_window", 4096), config["num_hidden_layers"]
    if not config.get("use_sliding_window") or window is None:
        return ()
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers", 28)
    return tuple(window if i >= first else None for i in range(layers))


class Qwen2Attention(SelfAttention):
    """With biases."""

    qkv_biased = True


class Qwen2Layer(DecoderLayer):
    """Of this attention."""

    attention = Qwen2Attention


def _from_hf(config: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig.from_hf(config, windows=read_windows(config))


FAMILY = Family(architectures=("Qwen2ForCausalLM",), from_hf=_from_hf, gguf=("qwen2",), layer=Qwen2Layer)
