"""Qwen3: Llama whose q and k heads are normalized before they are rotated (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from servekit.models.family import Family
from servekit.models.layers import RMSNorm
from servekit.models.llama import LlamaConfig, LlamaLayer
from servekit.models.qwen2 import read_qwen
from servekit.models.tensor_loader import TensorLoader


class Qwen3Layer(LlamaLayer):
    """A layer with a norm for each q head and each k head."""

    def __init__(self, config: LlamaConfig, index: int, load: TensorLoader) -> None:
        super().__init__(config, index, load)
        at = f"model.layers.{index}.self_attn."
        self.q_norm = RMSNorm(load.tensor(at + "q_norm.weight"), config.norm_eps)
        self.k_norm = RMSNorm(load.tensor(at + "k_norm.weight"), config.norm_eps)

    def shape_heads(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.split((self._config.heads, self._config.kv_heads, self._config.kv_heads), 1)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), 1)

    @staticmethod
    def shapes(config: LlamaConfig, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from LlamaLayer.shapes(config, index)
        yield "self_attn.q_norm.weight", (config.head_size,)
        yield "self_attn.k_norm.weight", (config.head_size,)


QWEN3 = Family(
    "Qwen3ForCausalLM",
    read_qwen,
    Qwen3Layer,
    gguf="qwen3",
    gguf_layer={"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
)
