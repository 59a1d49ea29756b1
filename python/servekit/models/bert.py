"""The BERT family, for embeddings: every token sees its whole text, nothing is cached (https://arxiv.org/abs/1810.04805)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from servekit.engine.linear import LinearFactory
from servekit.engine.plan import Ints
from servekit.models.tensor_loader import TensorLoader
from servekit.models.weights import WeightError, Weights

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes and constants of one model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab_size: int
    context: int
    token_types: int
    norm_eps: float
    activation: str

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> BertConfig:
        """From a folder's `config.json`.

        Raises:
            WeightError: a key is missing, or asks for what this family can't do.
        """
        try:
            made = cls(
                layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                intermediate=config["intermediate_size"],
                heads=config["num_attention_heads"],
                vocab_size=config["vocab_size"],
                context=config["max_position_embeddings"],
                token_types=config.get("type_vocab_size", 2),
                norm_eps=config.get("layer_norm_eps", 1e-12),
                activation=config.get("hidden_act", "gelu"),
            )
        except KeyError as error:
            raise WeightError(f"config.json lacks {error}") from None
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise WeightError(
                f"position_embedding_type {config['position_embedding_type']!r} is not known: only absolute"
            )
        if made.activation not in _ACTIVATIONS:
            raise WeightError(f"activation {made.activation!r} is not known; known are {', '.join(_ACTIVATIONS)}")
        if made.heads < 1 or made.hidden % made.heads:
            raise WeightError(f"impossible sizes: {made.heads} heads in {made.hidden}")
        return made


class BertLayer(nn.Module):  # type: ignore[misc]
    """Attention and feed-forward network; what comes in is added to what goes out of each, and then normalized."""

    def __init__(self, config: BertConfig, index: int, load: TensorLoader) -> None:
        super().__init__()
        self._heads = config.heads
        self._activation = _ACTIVATIONS[config.activation]
        at = f"encoder.layer.{index}."
        h, f = config.hidden, config.intermediate
        self.qkv = load.linear(at + "attention.self.", {"query": h, "key": h, "value": h}, h, biased=True)
        self.output = load.linear(at, {"attention.output.dense": h}, h, biased=True)
        self.attention_norm = _norm(config, load, at + "attention.output.LayerNorm")
        self.up = load.linear(at, {"intermediate.dense": f}, h, biased=True)
        self.down = load.linear(at, {"output.dense": h}, f, biased=True)
        self.norm = _norm(config, load, at + "output.LayerNorm")

    def forward(self, x: torch.Tensor, groups: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self._heads, -1).unbind(1)
        seen = torch.empty_like(x)
        for at, length in groups:
            parts = (part[at].view(-1, length, *part.shape[1:]).transpose(1, 2) for part in (q, k, v))
            seen[at] = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(len(at), -1)
        x = self.attention_norm(x + self.output(seen))
        found: torch.Tensor = self.norm(x + self.down(self._activation(self.up(x))))
        return found


class Bert(nn.Module):  # type: ignore[misc]
    """The whole model, without pooler and heads. Arguments as of `Decoder`.

    Raises:
        WeightError: a tensor is missing or has another shape than the sizes say.
    """

    def __init__(
        self,
        config: BertConfig,
        weights: Weights,
        linear: LinearFactory,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None],
    ) -> None:
        super().__init__()
        self.config = config
        # Checkpoints of models with a head have the encoder under this name.
        prefix = "bert." if "bert.embeddings.word_embeddings.weight" in weights.names else ""
        load = TensorLoader(weights, linear, dtype, device, progress, prefix=prefix)
        h = config.hidden
        self.words = load.tensor("embeddings.word_embeddings.weight", config.vocab_size, h)
        # Every text is a first segment, so its embedding is part of every position's.
        types = load.tensor("embeddings.token_type_embeddings.weight", config.token_types, h)
        self.positions = load.tensor("embeddings.position_embeddings.weight", config.context, h) + types[0]
        self.norm = _norm(config, load, "embeddings.LayerNorm")
        self.layers = nn.ModuleList(BertLayer(config, i, load) for i in range(config.layers))
        load.finish()

    def forward(self, ids: torch.Tensor, counts: Ints) -> torch.Tensor:
        """States behind the last layer.

        Args:
            ids: [tokens] int64, texts side by side.
            counts: [texts] tokens of each.

        Returns:
            [tokens, hidden].
        """
        firsts = np.cumsum(counts) - counts
        within = np.arange(len(ids)) - np.repeat(firsts, counts)
        x = self.norm(F.embedding(ids, self.words) + self.positions[torch.from_numpy(within).to(ids.device)])
        groups = []
        for length in np.unique(counts).tolist():
            # Texts of one length need no padding, so a text's states do not depend on its batch mates.
            at = firsts[counts == length][:, None] + np.arange(length)
            groups.append((torch.from_numpy(at.reshape(-1)).to(ids.device), length))
        for layer in self.layers:
            x = layer(x, groups)
        return x

    @staticmethod
    def linear_shapes(config: BertConfig) -> list[tuple[int, int]]:
        """Shapes (out, in) of one layer's matrices."""
        h, f = config.hidden, config.intermediate
        return [(3 * h, h), (h, h), (f, h), (h, f)]


def _norm(config: BertConfig, load: TensorLoader, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, bias = (load.tensor(f"{name}.{kind}", config.hidden) for kind in ("weight", "bias"))
    return lambda x: F.layer_norm(x, (config.hidden,), weight, bias, config.norm_eps)
