"""Tiny checkpoints of every family, the same on every machine: configurations, and tensors from seeded numbers.

`tests/data/write_model_logits.py` writes down what transformers makes of them.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.unit.llama_reference import save_folder

DATA = Path(__file__).parents[1] / "data/model_logits.json"
VOCABULARY = 61
PICKED = 8
"""Logits that are written down of each position."""

_BASE: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA = _BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 8}
_MISTRAL = _BASE | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 8}
_QWEN2 = _BASE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = _BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
_YARN_BOUNDS = {"beta_fast": 8.0, "beta_slow": 2.0, "mscale": 1.5, "mscale_all_dim": 0.5}
_YARN_EXACT = {"truncate": False, "attention_factor": 1.25}

CASES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-tied": _LLAMA | {"tie_word_embeddings": True},
    "llama-biased": _LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-linear": _LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    # Its frequencies change behind 12 tokens.
    "llama-dynamic": _LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 12},
    "llama-llama3": _LLAMA | {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 16}},
    "llama-yarn": _LLAMA | {"rope_scaling": _YARN, "max_position_embeddings": 4096},
    "mistral": _MISTRAL | {"sliding_window": 6},
    "mistral-yarn": _MISTRAL
    | {"sliding_window": None, "rope_scaling": _YARN | _YARN_EXACT, "max_position_embeddings": 4096},
    "qwen2": _QWEN2 | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen2-yarn": _QWEN2
    | {"rope_scaling": _YARN | _YARN_BOUNDS, "tie_word_embeddings": True, "max_position_embeddings": 4096},
    "qwen3": _QWEN3,
    "qwen3-windows": _QWEN3
    | {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "qwen3-moe": _QWEN3_MOE,
    "qwen3-moe-mixed": _QWEN3_MOE
    | {"norm_topk_prob": False, "mlp_only_layers": [0], "num_experts_per_tok": 3, "sliding_window": 9}
    | {"use_sliding_window": True},
}


def sequences() -> list[list[int]]:
    """Token ids of a few sequences."""
    generator = np.random.RandomState(3)
    return [generator.randint(0, VOCABULARY, size=n).tolist() for n in (1, 8, 27)]


def picked(position: int) -> list[int]:
    """Tokens whose logits are written down for a position; over the positions all come up."""
    return [(position + k * PICKED) % VOCABULARY for k in range(PICKED)]


def tensors(c: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A checkpoint; numbers depend on a tensor's name and shape only."""
    return {name: _numbers(name, shape) for name, shape in _shapes(c).items()}


def save_case(folder: Path, case: str) -> Path:
    """Write a case's checkpoint as a folder."""
    return save_folder(folder, CASES[case], tensors(CASES[case]))


def golden_logits(case: str) -> list[torch.Tensor]:
    """What transformers says of each sequence: [positions, PICKED] float64."""
    rows = iter(json.loads(DATA.read_text())[case])
    return [torch.tensor([next(rows) for _ in ids], dtype=torch.float64) for ids in sequences()]


def _numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    # This generator's stream is promised never to change.
    spread = np.random.RandomState(zlib.crc32(name.encode())).uniform(-1.7, 1.7, size=shape)
    values = 1 + spread / 4 if name.endswith("norm.weight") else spread / np.sqrt(shape[-1])
    return torch.from_numpy(values.astype(np.float32))


def _shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    h, f, kind = c["hidden_size"], c["intermediate_size"], c["model_type"]
    d = c.get("head_dim") or h // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, h), "model.norm.weight": (h,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (VOCABULARY, h)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        out |= {at + "input_layernorm.weight": (h,), at + "post_attention_layernorm.weight": (h,)}
        for name, shape in {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}.items():
            out[f"{at}self_attn.{name}_proj.weight"] = shape
            if c.get("attention_bias") or (kind == "qwen2" and name != "o"):
                out[f"{at}self_attn.{name}_proj.bias"] = shape[:1]
        if kind.startswith("qwen3"):
            out |= {at + "self_attn.q_norm.weight": (d,), at + "self_attn.k_norm.weight": (d,)}
        networks = {"": f}
        if "num_experts" in c and i not in c.get("mlp_only_layers", ()):
            out[at + "mlp.gate.weight"] = (c["num_experts"], h)
            networks = {f"experts.{e}.": c["moe_intermediate_size"] for e in range(c["num_experts"])}
        for network, width in networks.items():
            for name, shape in {"gate": (width, h), "up": (width, h), "down": (h, width)}.items():
                out[f"{at}mlp.{network}{name}_proj.weight"] = shape
                if c.get("mlp_bias"):
                    out[f"{at}mlp.{network}{name}_proj.bias"] = shape[:1]
    return out
