"""Qwen2 and 2.5: Llama with biases on q, k and v (https://arxiv.org/abs/2407.10671)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from servekit.models.family import Family, windows_of
from servekit.models.llama import LlamaConfig


def read_qwen(config: dict[str, Any]) -> LlamaConfig:
    """Sizes, with windows in the layers from `max_window_layers` on if the file asks for any.

    Raises:
        WeightError: as `LlamaConfig.from_hf`.
    """
    made = LlamaConfig.from_hf(config)
    if not config.get("use_sliding_window"):
        return made
    return replace(made, windows=windows_of(config, made.layers, config.get("max_window_layers", 28)))


QWEN2 = Family("Qwen2ForCausalLM", read_qwen, gguf="qwen2")
