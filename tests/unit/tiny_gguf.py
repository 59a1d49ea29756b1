"""The tiny checkpoints as GGUF files, as llama.cpp's converter would write them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.unit.tiny_models import CASES, tensors

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}


def save_gguf_case(path: Path, case: str) -> Path:
    """Write a case of `tiny_models.py`."""
    return save_gguf(path, CASES[case], tensors(CASES[case]))


def save_gguf(path: Path, c: dict[str, Any], w: dict[str, torch.Tensor]) -> Path:
    """Write a configuration in Hugging Face's words and its tensors.

    Rotary pairs of q and k lie side by side in the llama architecture, experts one behind the other.
    """
    arch = _ARCHITECTURES[c.get("model_type", "llama")]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    if "head_dim" in c:
        writer.add_value_length(c["head_dim"])
        writer.add_key_length(c["head_dim"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    if c.get("sliding_window"):
        writer.add_sliding_window(c["sliding_window"])
    if "num_experts" in c:
        writer.add_expert_count(c["num_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    _add_rope(writer, c)
    names = gguf.get_tensor_name_map(arch, c["num_hidden_layers"])
    for name, tensor in _joined_experts(w).items():
        if arch == gguf.MODEL_ARCH.LLAMA:
            for part, heads in (("q_proj", c["num_attention_heads"]), ("k_proj", c["num_key_value_heads"])):
                if part in name:
                    tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope(writer: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    rope = c.get("rope_scaling") or {}
    kind = rope.get("type") or rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale" in rope:
            # What llama.cpp multiplies it with is the paper's factor.
            stretch = math.log(rope["factor"]) / 10
            wanted = (1 + rope["mscale"] * stretch) / (1 + rope["mscale_all_dim"] * stretch)
            writer.add_rope_scaling_attn_factors(wanted / (1 + stretch))
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if kind == "llama3":
        divisors = []
        for j in range(c["head_dim"] // 2):
            length = 2 * math.pi * c["rope_theta"] ** (2 * j / c["head_dim"])
            smooth = (rope["original_max_position_embeddings"] / length - 1) / 3
            smooth = min(max(smooth, 0), 1)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def _joined_experts(w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    joined: dict[str, Any] = {}
    for name, tensor in w.items():
        head, mark, rest = name.partition(".experts.")
        if mark:
            joined.setdefault(f"{head}{mark}{rest.partition('.')[2]}", []).append(tensor)
        else:
            joined[name] = tensor
    return {name: torch.stack(value) if isinstance(value, list) else value for name, value in joined.items()}
