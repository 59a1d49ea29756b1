"""What a model family is to the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from servekit.models.gguf_file import GgufFile
from servekit.models.llama import LlamaConfig, LlamaLayer

_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of generating models over the layers that Llama has.

    Attributes:
        architecture: its class name in `config.json`.
        read: sizes from a `config.json`.
        layer: what its layers are.
        gguf: the name of its architecture in GGUF files, None if it is not read from these.
        gguf_layer: further names of a layer's tensors: Hugging Face's to GGUF's, without ".weight".
        interleaved: GGUF files have the rotary pairs of q and k side by side.
    """

    architecture: str
    read: Callable[[dict[str, Any]], LlamaConfig] = LlamaConfig.from_hf
    layer: type[LlamaLayer] = LlamaLayer
    gguf: str | None = None
    gguf_layer: dict[str, str] = field(default_factory=dict)
    interleaved: bool = False

    def map_gguf(self, file: GgufFile) -> tuple[dict[str, str], dict[str, int]]:
        """Names and interleaved heads of a GGUF file, see `GgufWeights`."""
        config = LlamaConfig.from_gguf(file)
        names, heads = dict(_GGUF_NAMES), {}
        for i in range(config.layers):
            for kind in ("weight", "bias"):
                layer = (_GGUF_LAYER | self.gguf_layer).items()
                names |= {f"model.layers.{i}.{hf}.{kind}": f"blk.{i}.{own}.{kind}" for hf, own in layer}
                if self.interleaved:
                    heads[f"blk.{i}.attn_q.{kind}"] = config.heads
                    heads[f"blk.{i}.attn_k.{kind}"] = config.kv_heads
        return names, heads


def windows_of(config: dict[str, Any], layers: int, first: int = 0) -> tuple[int, ...]:
    """Sliding windows of all layers from `first` on, as a `config.json` says; empty if there are none."""
    window = config.get("sliding_window")
    return (*[0] * min(first, layers), *[window] * (layers - first)) if window else ()
