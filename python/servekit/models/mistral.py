"""Mistral: Llama whose layers may see only so far back (https://arxiv.org/abs/2310.06825)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from servekit.models.family import Family, windows_of
from servekit.models.llama import LlamaConfig

_FIRST_WINDOW = 4096
"""What a file means that does not speak of windows at all."""


def _read(config: dict[str, Any]) -> LlamaConfig:
    made = LlamaConfig.from_hf(config)
    return replace(made, windows=windows_of({"sliding_window": _FIRST_WINDOW, **config}, made.layers))


MISTRAL = Family("MistralForCausalLM", _read)
