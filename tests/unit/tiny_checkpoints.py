"""Tiny random checkpoints of every family, the same on every machine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from servekit.models.llama import expected_shapes
from servekit.models.registry import find_family, read_config

VOCAB = 97
_BASE: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, "factor": 4.0, **more}}


_YARN = {"original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-linear": _LLAMA | _scaled("linear"),
    "llama-llama3": _LLAMA
    | _scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    "llama-dynamic": _LLAMA | _scaled("dynamic") | {"max_position_embeddings": 16},
    "llama-yarn": _LLAMA | _scaled("yarn", **_YARN),
    "llama-yarn-tuned": _LLAMA
    | _scaled("yarn", beta_fast=8, beta_slow=2, mscale=1.0, mscale_all_dim=0.8, **_YARN)
    | {"head_dim": 16},
    "mistral": _MISTRAL | {"sliding_window": None},
    "mistral-window": _MISTRAL | {"sliding_window": 7},
    "qwen2": _QWEN2 | {"tie_word_embeddings": True, "head_dim": None},
    "qwen2-window": _QWEN2
    | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "head_dim": None},
    "qwen3": _QWEN3 | {"head_dim": 16},
    "qwen3-moe": _MOE | {"norm_topk_prob": True},
    "qwen3-moe-mixed": _MOE | {"norm_topk_prob": False, "mlp_only_layers": [1]},
}


def write_checkpoint(folder: Path, variant: str) -> Path:
    """Write a variant's `config.json` and weights; returns the folder."""
    folder.mkdir()
    config = {key: value for key, value in (_BASE | VARIANTS[variant]).items() if key != "head_dim" or value}
    (folder / "config.json").write_text(json.dumps(config))
    # Unlike Generator's, the stream of this class is promised never to change.
    random = np.random.RandomState(11)

    def rand(*shape: int) -> torch.Tensor:
        return torch.from_numpy((random.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32))

    weights = {}
    for name, shape in expected_shapes(read_config(folder), find_family(folder).layer):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        weights[name] = rand(*shape) + (1 if len(shape) == 1 else 0)
        if config["model_type"] == "qwen2" and any(f".{part}_proj.weight" in name for part in "qkv"):
            weights[name.replace("weight", "bias")] = rand(shape[0])
    save_file(weights, folder / "model.safetensors")
    return folder


def sequences() -> list[list[int]]:
    """Prompts to try a checkpoint with; the longest goes beyond every window and original context."""
    random = np.random.RandomState(12)
    return [random.randint(0, VOCAB, size=n).tolist() for n in (3, 18, 41)]
