"""A tiny random Llama: its checkpoint, and a second implementation that knows no cache, no pages and no batch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def tensors(c: dict) -> dict[str, torch.Tensor]:
    """Random weights of a checkpoint."""
    generator = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    h, f, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    out = {"model.embed_tokens.weight": rand(c["vocab_size"], h), "model.norm.weight": 1 + rand(h)}
    if not c.get("tie_word_embeddings"):
        out["lm_head.weight"] = rand(c["vocab_size"], h)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        out |= {at + "input_layernorm.weight": 1 + rand(h), at + "post_attention_layernorm.weight": 1 + rand(h)}
        for name, shape in {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}.items():
            out[f"{at}self_attn.{name}_proj.weight"] = rand(*shape)
            if c.get("attention_bias"):
                out[f"{at}self_attn.{name}_proj.bias"] = rand(shape[0])
        for name, shape in {"gate": (f, h), "up": (f, h), "down": (h, f)}.items():
            out[f"{at}mlp.{name}_proj.weight"] = rand(*shape)
    return out


def reference(c: dict, w: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Logits of every position, in float64, one head at a time."""
    w = {name: tensor.double() for name, tensor in w.items()}
    d, heads, kv_heads, n = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"], len(ids)
    scaling = c.get("rope_scaling") or {}
    base = (c.get("rope_parameters") or {}).get("rope_theta") or c["rope_theta"]
    angles = torch.zeros(n, d // 2, dtype=torch.float64)
    for j in range(d // 2):
        frequency = base ** (-2 * j / d)
        if scaling.get("type") == "linear":
            frequency /= scaling["factor"]
        if scaling.get("rope_type") == "llama3":
            length = 2 * math.pi / frequency
            if length > 16 / 1.0:
                frequency /= 8
            elif length > 16 / 4.0:
                smooth = (16 / length - 1.0) / (4.0 - 1.0)
                frequency = (1 - smooth) * frequency / 8 + smooth * frequency
        angles[:, j] = torch.arange(n) * frequency

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt() * w[name]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x[:, : d // 2], x[:, d // 2 :]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[name + ".weight"].T + w.get(name + ".bias", torch.zeros(1, dtype=torch.float64))

    x = w["model.embed_tokens.weight"][ids]
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        y = norm(x, at + "input_layernorm.weight")
        q, k, v = (project(y, f"{at}self_attn.{name}_proj").split(d, -1) for name in "qkv")
        outs = []
        for head in range(heads):
            g = head // (heads // kv_heads)
            scores = rotate(q[head]) @ rotate(k[g]).T / math.sqrt(d)
            outs.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[g])
        x = x + project(torch.cat(outs, -1), at + "self_attn.o_proj")
        y = norm(x, at + "post_attention_layernorm.weight")
        gate, up = project(y, at + "mlp.gate_proj"), project(y, at + "mlp.up_proj")
        x = x + project(gate * torch.sigmoid(gate) * up, at + "mlp.down_proj")
    return norm(x, "model.norm.weight") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def save_folder(folder: Path, c: dict, w: dict[str, torch.Tensor], shards: int = 1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(c))
    if shards == 1:
        save_file(w, folder / "model.safetensors")
        return folder
    names, weight_map = sorted(w), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: w[name] for name in names[shard::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[shard::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
