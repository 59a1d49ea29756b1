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
from servekit.models.layers import GatedFfn, RMSNorm
from servekit.models.rope import Rope, RopeScaling, read_rope_scaling, rotate_
from servekit.models.tensor_loader import TensorLoader
from servekit.models.weights import WeightError, Weights


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts in some layers.

    Attributes:
        count: experts in a layer.
        used: of them for each token.
        intermediate: inner width of one.
        normalized: the weights of those used are made to sum up to 1.
        layers: which layers have a mixture.
    """

    count: int
    used: int
    intermediate: int
    normalized: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and constants of one model; head size times heads need not be the hidden size.

    Attributes:
        windows: for each layer, how many tokens back it sees, 0 for all; empty if all layers see all.
        experts: of a mixture, None for one feed-forward network a layer.
    """

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
    windows: tuple[int, ...] = ()
    experts: Experts | None = None

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
                rope_scaling=read_rope_scaling(rope, config.get("max_position_embeddings", 2048)),
                tied=config.get("tie_word_embeddings", False),
            )
        except KeyError as error:
            raise WeightError(f"config.json lacks {error}") from None

    @classmethod
    def from_gguf(cls, file: GgufFile) -> LlamaConfig:
        """From a GGUF file's metadata, whatever name its architecture has there.

        Raises:
            WeightError: a key is missing.
        """
        m, own = file.metadata, file.metadata.get("general.architecture")
        try:
            heads, hidden = m[f"{own}.attention.head_count"], m[f"{own}.embedding_length"]
            scaling, context = m.get(f"{own}.rope.scaling.type", "none"), m[f"{own}.context_length"]
            factor = m.get(f"{own}.rope.scaling.factor")
            original = m.get(f"{own}.rope.scaling.original_context_length", context)
            stretched = None if scaling == "none" or factor is None else RopeScaling(scaling, factor, original)
            return cls(
                layers=m[f"{own}.block_count"],
                hidden=hidden,
                intermediate=m[f"{own}.feed_forward_length"],
                heads=heads,
                kv_heads=m.get(f"{own}.attention.head_count_kv", heads),
                head_size=m.get(f"{own}.attention.key_length", hidden // heads),
                vocab_size=file.tensors["token_embd.weight"].shape[0],
                context=context,
                norm_eps=m[f"{own}.attention.layer_norm_rms_epsilon"],
                rope_base=m.get(f"{own}.rope.freq_base", 10000.0),
                rope_scaling=stretched,
                tied="output.weight" not in file.tensors,
            )
        except KeyError as error:
            raise WeightError(f"the GGUF file lacks {error}") from None


_ROPE_DIVISORS = "rope_freqs.weight"


class LlamaLayer(nn.Module):  # type: ignore[misc]
    """Attention and gated feed-forward network, each behind a norm and added to what came in.

    Other families change single parts of it.
    """

    def __init__(self, config: LlamaConfig, index: int, load: TensorLoader) -> None:
        super().__init__()
        self._config = config
        self._index = index
        at = f"model.layers.{index}."
        self.attention_norm = RMSNorm(load.tensor(at + "input_layernorm.weight"), config.norm_eps)
        self.qkv = load.linear(*(f"{at}self_attn.{name}_proj" for name in "qkv"))
        self.output = load.linear(at + "self_attn.o_proj")
        self.ffn_norm = RMSNorm(load.tensor(at + "post_attention_layernorm.weight"), config.norm_eps)
        self.ffn = self.make_ffn(config, load, at)

    def make_ffn(self, config: LlamaConfig, load: TensorLoader, at: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """The feed-forward network, whose tensors' names begin with `at`."""
        return GatedFfn(load.linear(at + "mlp.gate_proj", at + "mlp.up_proj"), load.linear(at + "mlp.down_proj"))

    def shape_heads(self, qkv: torch.Tensor) -> torch.Tensor:
        """What happens to the heads before their rotation, [tokens, heads + 2 * kv heads, head size]."""
        return qkv

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: Attention) -> torch.Tensor:
        c, n = self._config, x.shape[0]
        qkv = self.qkv(self.attention_norm(x)).view(n, c.heads + 2 * c.kv_heads, c.head_size)
        qkv = self.shape_heads(qkv)
        rotate_(qkv[:, : c.heads + c.kv_heads], rope)
        kv = qkv[:, c.heads :].view(n, 2, c.kv_heads, c.head_size)
        x = x + self.output(attention.attend(self._index, qkv[:, : c.heads], kv))
        return x + self.ffn(self.ffn_norm(x))

    @staticmethod
    def shapes(config: LlamaConfig, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name within the layer and shape of every tensor; biases of linear layers are left out."""
        q, kv = config.heads * config.head_size, config.kv_heads * config.head_size
        yield "input_layernorm.weight", (config.hidden,)
        yield "post_attention_layernorm.weight", (config.hidden,)
        yield "self_attn.q_proj.weight", (q, config.hidden)
        yield "self_attn.k_proj.weight", (kv, config.hidden)
        yield "self_attn.v_proj.weight", (kv, config.hidden)
        yield "self_attn.o_proj.weight", (config.hidden, q)
        if config.experts is None or index not in config.experts.layers:
            yield "mlp.gate_proj.weight", (config.intermediate, config.hidden)
            yield "mlp.up_proj.weight", (config.intermediate, config.hidden)
            yield "mlp.down_proj.weight", (config.hidden, config.intermediate)


class Llama(nn.Module):  # type: ignore[misc]
    """The whole model of this family, or, with other layers, of another one.

    Args:
        config: its sizes.
        weights: where the tensors come from.
        linear: makes the linear layers.
        dtype, device: of activations, embeddings and norms.
        progress: called with (tensors done, tensors in all).
        layer: what its layers are.

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
        layer: type[LlamaLayer] = LlamaLayer,
    ) -> None:
        super().__init__()
        self.config = config
        shapes = dict(expected_shapes(config, layer))
        load = TensorLoader(weights, shapes, linear, dtype, device, progress, absent=int(config.tied))
        self.embedding = load.tensor("model.embed_tokens.weight")
        divisors = weights.get(_ROPE_DIVISORS) if _ROPE_DIVISORS in weights.names else None
        self.rope = Rope(config.head_size, config.rope_base, config.rope_scaling, divisors, dtype, device)
        self.layers = nn.ModuleList(layer(config, i, load) for i in range(config.layers))
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


def expected_shapes(config: LlamaConfig, layer: type[LlamaLayer] = LlamaLayer) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that the model needs."""
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden)
    yield "model.norm.weight", (config.hidden,)
    yield "lm_head.weight", (config.vocab_size, config.hidden)
    for i in range(config.layers):
        yield from ((f"model.layers.{i}.{name}", shape) for name, shape in layer.shapes(config, i))
