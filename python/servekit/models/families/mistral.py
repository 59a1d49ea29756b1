"""Mistral: Llama's layers, which may see only a window of the last tokens (https://arxiv.org/abs/2310.06825)."""

from __future__ import annotations

from typing import Any

from servekit.models.decoder import DecoderConfig, Family


def _from_hf(config: dict[str, Any]) -> DecoderConfig:
    # A file that says nothing means the first model's window; null means none.
    window = config.get("sliding_window", 4096)
    return DecoderConfig.from_hf(config, windows=() if window is None else (window,) * config["num_hidden_layers"])


FAMILY = Family(architectures=("MistralForCausalLM",), from_hf=_from_hf)
