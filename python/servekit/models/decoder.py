"""The decoder that generating families have in common: embedding, layers of attention and feed-forward, norm, head.

A family (see `families/`) says how its configuration is read and of which layers it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from servekit.engine.attention import Attention
from servekit.engine.linear import LinearFactory
from servekit.models.gguf_file import GgufFile
from servekit.models.layers import Embedding, GatedFeedForward, MixtureOfExperts, RMSNorm, add_
from servekit.models.rope import Rope, RopeParameters, rotate_
from servekit.models.split import Cut, ModelSizes, Span
from servekit.models.tensor_loader import TensorLoader
from servekit.models.weights import GgufSource, WeightError, Weights

if TYPE_CHECKING:
    from servekit.engine.group import StageGroup

ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and constants of one model; head size times heads need not be the hidden size.

    Attributes:
        context: tokens of the longest sequence.
        windows: of each layer how many tokens one sees, itself included; None is all. Empty where all see all.
        tied: the head is the embedding.
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
    rope: RopeParameters
    tied: bool = False
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.intermediate, self.kv_heads, self.head_size, self.vocab_size)
        if min(sizes) < 1 or self.heads % self.kv_heads or self.head_size % 2:
            raise WeightError(
                f"impossible sizes: {self.heads} heads of {self.head_size} over {self.kv_heads} KV heads,"
                f" {self.layers} layers of {self.hidden} and {self.intermediate}, {self.vocab_size} tokens"
            )
        if self.windows and (len(self.windows) != self.layers or any(w is not None and w < 1 for w in self.windows)):
            raise WeightError(f"impossible sliding windows of {self.layers} layers: {self.windows}")

    @classmethod
    def from_hf(cls, config: dict[str, Any], **changes: Any) -> Self:
        """From a folder's `config.json`.

        Args:
            config: its contents.
            changes: attributes that the family reads in a way of its own.

        Raises:
            KeyError: a key is missing.
            WeightError: the file asks for what is not known here.
        """
        if config.get("hidden_act", "silu") != "silu":
            raise WeightError(f"activation {config['hidden_act']!r} is not known; known is silu")
        quantized = config.get("quantization_config")
        if quantized:
            # Its weights could pass for plain ones, with quietly wrong answers.
            method = quantized.get("quant_method")
            raise WeightError(f"weights quantized by {method!r} are not known: take the plain model or a GGUF file")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        context = config.get("max_position_embeddings", 2048)
        found = {
            "layers": config["num_hidden_layers"],
            "hidden": hidden,
            "intermediate": config["intermediate_size"],
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_size": config.get("head_dim") or hidden // heads,
            "vocab_size": config["vocab_size"],
            "context": context,
            "norm_eps": config.get("rms_norm_eps", 1e-6),
            "rope": RopeParameters.from_hf(config, context),
            "tied": config.get("tie_word_embeddings", False),
        }
        return cls(**(found | changes))

    @classmethod
    def from_gguf(cls, file: GgufFile, **changes: Any) -> Self:
        """From a GGUF file's metadata; arguments and errors as of `from_hf`."""
        m, arch = file.metadata, file.metadata["general.architecture"]
        heads, hidden = m[f"{arch}.attention.head_count"], m[f"{arch}.embedding_length"]
        head_size, context = m.get(f"{arch}.attention.key_length", hidden // heads), m[f"{arch}.context_length"]
        found = {
            "layers": m[f"{arch}.block_count"],
            "hidden": hidden,
            "intermediate": m[f"{arch}.feed_forward_length"],
            "heads": heads,
            "kv_heads": m.get(f"{arch}.attention.head_count_kv", heads),
            "head_size": head_size,
            "vocab_size": file.tensors["token_embd.weight"].shape[0],
            "context": context,
            "norm_eps": m[f"{arch}.attention.layer_norm_rms_epsilon"],
            "rope": RopeParameters.from_gguf(m, head_size, context),
            "tied": "output.weight" not in file.tensors,
        }
        return cls(**(found | changes))

    def sizes(self) -> ModelSizes:
        """What ranks can split."""
        return ModelSizes(self.layers, self.heads, self.kv_heads, self.vocab_size, dense_width=self.intermediate)

    def linear_shapes(self) -> list[tuple[int, int]]:
        """Shapes (out, in) of one layer's matrices."""
        return [
            ((self.heads + 2 * self.kv_heads) * self.head_size, self.hidden),
            (self.hidden, self.heads * self.head_size),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]


class SelfAttention(nn.Module):  # type: ignore[misc]
    """Queries, keys and values of new tokens, turned by their positions; what they see of their sequences."""

    qkv_biased: ClassVar[bool] = False
    """Whether these need a bias; otherwise they may have one."""
    heads_normed: ClassVar[bool] = False
    """Whether queries and keys are normalized head by head before they are turned."""

    def __init__(self, config: DecoderConfig, index: int, load: TensorLoader, at: str) -> None:
        super().__init__()
        part, self.head_size = load.cut.attention, config.head_size
        heads, kv_heads = part.span(config.heads), part.shared(config.kv_heads)
        self.heads, self.kv_heads = heads.count, kv_heads.count
        # Which of its stage's layers it is.
        self._index = index - load.cut.layers.start
        q, kv = heads.times(self.head_size), kv_heads.times(self.head_size)
        rows: dict[str, int | Span] = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv = load.linear(at, rows, config.hidden, biased=self.qkv_biased)
        self.q_norm, self.k_norm = (
            RMSNorm(load.tensor(f"{at}{name}.weight", config.head_size), config.norm_eps) if self.heads_normed else None
            for name in ("q_norm", "k_norm")
        )
        # Where sequences or their tokens are shared out, the sum is over those of all ranks, and one has the bias.
        shared = load.cut.sequences.of * load.cut.queries.of > 1
        self._group = load.group if shared else None
        first = load.cut.queries.index == 0
        self.output = load.linear(at, {"o_proj": config.hidden}, q, summed=not shared, bias_here=first)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: Attention) -> torch.Tensor:
        if self._group is None:
            return self.attend(x, rope, attention)
        if attention.mine is None:
            return self._group.sum_(self.attend(x, rope, attention))
        # Every rank adds what it makes of its own tokens; a rank without any has only its place in the sum.
        out, mine = torch.zeros_like(x), attention.mine
        if mine.stop > mine.start:
            out[mine] = self.attend(x[mine], rope, attention)
        return self._group.sum_(out)

    def attend(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: Attention) -> torch.Tensor:
        """What this rank's heads make of its own tokens, x [tokens, hidden]."""
        n, h, kv = x.shape[0], self.heads, self.kv_heads
        qkv = self.qkv(x).view(n, h + 2 * kv, self.head_size)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, _ = qkv.split((h, kv, kv), 1)
            q.copy_(self.q_norm(q))
            k.copy_(self.k_norm(k))
        rotate_(qkv[:, : h + kv], rope)
        seen = attention.attend(self._index, qkv[:, :h], qkv[:, h:].view(n, 2, kv, self.head_size))
        return self.output(seen)


class DecoderLayer(nn.Module):  # type: ignore[misc]
    """Attention and feed-forward network, each behind a norm and added, in place, to what came in."""

    attention: ClassVar[type[SelfAttention]] = SelfAttention

    def __init__(self, config: DecoderConfig, index: int, load: TensorLoader) -> None:
        super().__init__()
        at = f"model.layers.{index}."
        self.attention_norm = RMSNorm(load.tensor(at + "input_layernorm.weight", config.hidden), config.norm_eps)
        self.self_attention = self.attention(config, index, load, at + "self_attn.")
        self.ffn_norm = RMSNorm(load.tensor(at + "post_attention_layernorm.weight", config.hidden), config.norm_eps)
        self.ffn = self.feed_forward(config, index, load, at + "mlp.")

    def feed_forward(self, config: DecoderConfig, index: int, load: TensorLoader, at: str) -> nn.Module:
        """The layer's second half."""
        return GatedFeedForward(load, at, config.hidden, load.cut.dense.span(config.intermediate))

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: Attention) -> torch.Tensor:
        add_(x, self.self_attention(self.attention_norm(x), rope, attention))
        return add_(x, self.ffn(self.ffn_norm(x)))


class Decoder(nn.Module):  # type: ignore[misc]
    """The whole model, or a rank's part of it: layers of its stage, of these its share.

    Args:
        config: its sizes.
        layer: what it is built of.
        weights: where the tensors come from.
        linear: makes the linear layers.
        dtype, device: of activations, embeddings and norms.
        progress: called with (tensors done, tensors in all).
        cut: this rank's part, None for all.
        group: the ranks of its stage, None where it is alone.

    Raises:
        WeightError: a tensor is missing or has another shape than the sizes say.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: type[DecoderLayer],
        weights: Weights,
        linear: LinearFactory,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None],
        cut: Cut | None = None,
        group: StageGroup | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.passed: Callable[[], None] = _unwatched
        self.cut = cut = cut or Cut(range(config.layers))
        load = TensorLoader(weights, linear, dtype, device, progress, cut=cut, group=group)
        rows = cut.dense.span(config.vocab_size)
        self.embedding: Embedding | None = None
        if cut.first or (cut.last and config.tied):
            self.embedding = Embedding(load, "model.embed_tokens.weight", rows, config.hidden)
        half = config.head_size // 2
        divisors = load.tensor(ROPE_DIVISORS, half).cpu() if load.has(ROPE_DIVISORS) else None
        self.rope = Rope(config.rope, config.head_size, divisors, dtype, device)
        self.layers = nn.ModuleList(layer(config, i, load) for i in cut.layers)
        if cut.last:
            self.norm = RMSNorm(load.tensor("model.norm.weight", config.hidden), config.norm_eps)
            if config.tied and self.embedding is not None:
                self.head = load.tied("model.embed_tokens.weight", rows, self.embedding.weight)
            else:
                self.head = load.linear("", {"lm_head": rows}, config.hidden)
        self._rows, self._group = rows, group
        load.finish()

    @property
    def recordable(self) -> bool:
        """Whether a step is one sequence of kernels, whatever its tokens, with no look at results in between."""
        return not any(isinstance(module, MixtureOfExperts) and module.grouped is None for module in self.modules())

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

    def states(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: Attention, x: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A step's tokens behind the last layer here, [tokens, hidden]; arguments as of `forward`.

        Args:
            x: what the stage before made, None in the first one; it is changed in place.
        """
        if x is None:
            assert self.embedding is not None
            x = self.embedding(ids)
        rope = self.rope.table(positions)
        for layer in self.layers:
            x = layer(x, rope, attention)
            self.passed()
        return x

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of some states of the last stage, [n, vocabulary] float32."""
        logits: torch.Tensor = self.head(self.norm(states)).float()
        return logits if self._group is None else self._group.join(logits, self._rows)


def _unwatched() -> None:
    """A layer is behind us, and nobody wants to know."""


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
    """What is known of one family of generating models.

    Attributes:
        architectures: class names in `config.json`.
        from_hf: the configuration from a folder's `config.json`; raises KeyError or WeightError.
        gguf: architectures in GGUF files; none where another family stands for it there.
        from_gguf: the configuration from a GGUF file; raises KeyError or WeightError.
        gguf_layer: what a layer's tensors are called in GGUF files, beside what all families have: Hugging Face's
            name within the layer, without `.weight`, to where it is within the file's block.
        interleaved: GGUF files keep the rotary pairs of q and k side by side.
        layer: what the models are built of.
    """

    architectures: tuple[str, ...]
    from_hf: Callable[[dict[str, Any]], DecoderConfig] = DecoderConfig.from_hf
    gguf: tuple[str, ...] = ()
    from_gguf: Callable[[GgufFile], DecoderConfig] = DecoderConfig.from_gguf
    gguf_layer: Callable[[Any], dict[str, GgufSource]] = lambda config: {}
    interleaved: bool = False
    layer: type[DecoderLayer] = DecoderLayer

    def gguf_sources(self, config: DecoderConfig) -> dict[str, GgufSource]:
        """Where each tensor of a model is in a GGUF file, by Hugging Face's name."""
        found = {
            "model.embed_tokens.weight": GgufSource("token_embd.weight"),
            "model.norm.weight": GgufSource("output_norm.weight"),
            "lm_head.weight": GgufSource("output.weight"),
            ROPE_DIVISORS: GgufSource(ROPE_DIVISORS),
        }
        within = {name: GgufSource(own) for name, own in _GGUF_LAYER.items()} | self.gguf_layer(config)
        if self.interleaved:
            within["self_attn.q_proj"] = GgufSource("attn_q", interleaved_heads=config.heads)
            within["self_attn.k_proj"] = GgufSource("attn_k", interleaved_heads=config.kv_heads)
        for i in range(config.layers):
            for kind in ("weight", "bias"):
                for name, source in within.items():
                    at = GgufSource(f"blk.{i}.{source.tensor}.{kind}", source.interleaved_heads, source.part)
                    found[f"model.layers.{i}.{name}.{kind}"] = at
        return found
