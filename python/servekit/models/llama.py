"""The Llama family: Llama 2 and 3, SmolLM and others of their shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from servekit.engine.attention import Attention
from servekit.engine.linear import LinearFactory
from servekit.models.gguf_file import GgufFile
from servekit.models.layers import RMSNorm, Rope, RopeScaling, rope_frequencies, rotate_
from servekit.models.tensor_loader import TensorLoader
from servekit.models.weights import WeightError, Weights


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and constants of one model; head size times heads need not be the hidden size."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    context: int
    norm_eps: float
    rope_base: float
    rope_scaling: RopeScaling | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.intermediate, self.kv_heads, self.head_size, self.vocab_size)
        if min(sizes) < 1 or self.heads % self.kv_heads or self.head_size % 2:
            raise WeightError(
                f"impossible sizes: {self.heads} heads of {self.head_size} over {self.kv_heads} KV heads,"
                f" {self.layers} layers of {self.hidden} and {self.intermediate}, {self.vocab_size} tokens"
            )

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> LlamaConfig:
        """From a folder's `config.json`.

        Raises:
            WeightError: a key is missing, or asks for what this family can't do.
        """
        if config.get("hidden_act", "silu") != "silu":
            raise WeightError(f"activation {config['hidden_act']!r} is not known; known is silu")
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            # Newer files gather everything about RoPE in one place.
            rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
            return cls(
                layers=config["num_hidden_layers"],
                hidden=hidden,
                intermediate=config["intermediate_size"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_size=config.get("head_dim") or hidden // heads,
                vocab_size=config["vocab_size"],
                context=config.get("max_position_embeddings", 2048),
                norm_eps=config.get("rms_norm_eps", 1e-6),
                rope_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
                rope_scaling=_rope_scaling(rope),
                tied=config.get("tie_word_embeddings", False),
            )
        except KeyError as error:
            raise WeightError(f"config.json lacks {error}") from None

    @classmethod
    def from_gguf(cls, file: GgufFile) -> LlamaConfig:
        """From a GGUF file's metadata.

        Raises:
            WeightError: a key is missing.
        """
        m = file.metadata
        try:
            heads, hidden = m["llama.attention.head_count"], m["llama.embedding_length"]
            scaling = m.get("llama.rope.scaling.type", "none")
            factor = m.get("llama.rope.scaling.factor")
            return cls(
                layers=m["llama.block_count"],
                hidden=hidden,
                intermediate=m["llama.feed_forward_length"],
                heads=heads,
                kv_heads=m.get("llama.attention.head_count_kv", heads),
                head_size=m.get("llama.attention.key_length", hidden // heads),
                vocab_size=file.tensors["token_embd.weight"].shape[0],
                context=m["llama.context_length"],
                norm_eps=m["llama.attention.layer_norm_rms_epsilon"],
                rope_base=m.get("llama.rope.freq_base", 10000.0),
                rope_scaling=None if scaling == "none" or factor is None else RopeScaling(scaling, factor),
                tied="output.weight" not in file.tensors,
            )
        except KeyError as error:
            raise WeightError(f"the GGUF file lacks {error}") from None


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    return RopeScaling(
        kind,
        rope["factor"],
        rope.get("low_freq_factor", 1.0),
        rope.get("high_freq_factor", 4.0),
        rope.get("original_max_position_embeddings", 8192),
    )


_ROPE_DIVISORS = "rope_freqs.weight"
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


def map_gguf(file: GgufFile) -> tuple[dict[str, str], dict[str, int]]:
    """Names and interleaved heads of a GGUF file, see `GgufWeights`."""
    config = LlamaConfig.from_gguf(file)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        _ROPE_DIVISORS: _ROPE_DIVISORS,
    }
    heads = {}
    for i in range(config.layers):
        for kind in ("weight", "bias"):
            names |= {f"model.layers.{i}.{hf}.{kind}": f"blk.{i}.{own}.{kind}" for hf, own in _GGUF_LAYER.items()}
            heads[f"blk.{i}.attn_q.{kind}"] = config.heads
            heads[f"blk.{i}.attn_k.{kind}"] = config.kv_heads
    return names, heads


class LlamaLayer(nn.Module):  # type: ignore[misc]
    """Attention and gated feed-forward network, each behind a norm and added to what came in."""

    def __init__(self, config: LlamaConfig, index: int, load: TensorLoader) -> None:
        super().__init__()
        self._config = config
        self._index = index
        at = f"model.layers.{index}."
        self.attention_norm = RMSNorm(load.tensor(at + "input_layernorm.weight"), config.norm_eps)
        self.qkv = load.linear(*(f"{at}self_attn.{name}_proj" for name in "qkv"))
        self.output = load.linear(at + "self_attn.o_proj")
        self.ffn_norm = RMSNorm(load.tensor(at + "post_attention_layernorm.weight"), config.norm_eps)
        self.gate_up = load.linear(at + "mlp.gate_proj", at + "mlp.up_proj")
        self.down = load.linear(at + "mlp.down_proj")

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: Attention) -> torch.Tensor:
        c, n = self._config, x.shape[0]
        qkv = self.qkv(self.attention_norm(x)).view(n, c.heads + 2 * c.kv_heads, c.head_size)
        rotate_(qkv[:, : c.heads + c.kv_heads], rope)
        kv = qkv[:, c.heads :].view(n, 2, c.kv_heads, c.head_size)
        x = x + self.output(attention.attend(self._index, qkv[:, : c.heads], kv))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate).mul_(up))


class Llama(nn.Module):  # type: ignore[misc]
    """The whole model.

    Args:
        config: its sizes.
        weights: where the tensors come from.
        linear: makes the linear layers.
        dtype, device: of activations, embeddings and norms.
        progress: called with (tensors done, tensors in all).

    Raises:
        WeightError: a tensor is missing or has another shape than the sizes say.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        linear: LinearFactory,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None],
    ) -> None:
        super().__init__()
        self.config = config
        shapes = dict(expected_shapes(config))
        load = TensorLoader(weights, shapes, linear, dtype, device, progress, absent=int(config.tied))
        self.embedding = load.tensor("model.embed_tokens.weight")
        divisors = weights.get(_ROPE_DIVISORS) if _ROPE_DIVISORS in weights.names else None
        try:
            frequencies = rope_frequencies(config.head_size, config.rope_base, config.rope_scaling, divisors)
        except ValueError as error:
            raise WeightError(str(error)) from None
        self.rope = Rope(frequencies.to(device), dtype)
        self.layers = nn.ModuleList(LlamaLayer(config, i, load) for i in range(config.layers))
        self.norm = RMSNorm(load.tensor("model.norm.weight"), config.norm_eps)
        tied = config.tied or "lm_head.weight" not in weights.names
        self.head = linear(self.embedding, None) if tied else load.linear("lm_head")

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Logits of some of a step's tokens.

        Args:
            ids, positions: [tokens] int64.
            last: [sampled] indices of the tokens whose logits are wanted.

        Returns:
            [sampled, vocabulary] float32.
        """
        return self.logits(self.states(ids, positions, attention)[last])

    def states(self, ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """A step's tokens behind the last layer, [tokens, hidden]; arguments as of `forward`."""
        x = F.embedding(ids, self.embedding)
        rope = self.rope.table(positions)
        for layer in self.layers:
            x = layer(x, rope, attention)
        return x

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of some states, [n, vocabulary] float32."""
        logits: torch.Tensor = self.head(self.norm(states)).float()
        return logits

    @staticmethod
    def linear_shapes(config: LlamaConfig) -> list[tuple[int, int]]:
        """Shapes (out, in) of one layer's matrices."""
        return [
            ((config.heads + 2 * config.kv_heads) * config.head_size, config.hidden),
            (config.hidden, config.heads * config.head_size),
            (2 * config.intermediate, config.hidden),
            (config.hidden, config.intermediate),
        ]


def expected_shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that the model needs."""
    q, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden)
    yield "model.norm.weight", (config.hidden,)
    yield "lm_head.weight", (config.vocab_size, config.hidden)
    for i in range(config.layers):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", (config.hidden,)
        yield at + "post_attention_layernorm.weight", (config.hidden,)
        yield at + "self_attn.q_proj.weight", (q, config.hidden)
        yield at + "self_attn.k_proj.weight", (kv, config.hidden)
        yield at + "self_attn.v_proj.weight", (kv, config.hidden)
        yield at + "self_attn.o_proj.weight", (config.hidden, q)
        yield at + "mlp.gate_proj.weight", (config.intermediate, config.hidden)
        yield at + "mlp.up_proj.weight", (config.intermediate, config.hidden)
        yield at + "mlp.down_proj.weight", (config.hidden, config.intermediate)
