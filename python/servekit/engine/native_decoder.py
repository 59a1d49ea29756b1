"""All layers of a decoder in one call of the extension.

A step of one stream is hundreds of small operations, and each costs more on its way through Python and torch than in
the processor. Where the extension has kernels for all that a model's layers do, they are handed to it once, and it goes
through them by itself. The model's modules say what is computed: everything here is read from them, and the sums are
those that they make with the same kernels, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from servekit._core import DecoderLayers, StoredMatrix
from servekit.engine.attention import AttentionBackend
from servekit.engine.native import NativeLinear
from servekit.engine.native_attention import NativeAttention
from servekit.models.decoder import Decoder, DecoderLayer, SelfAttention
from servekit.models.layers import GatedFeedForward, RMSNorm

Norm = tuple[int, float]
"""Where its weights are, and its epsilon."""


@dataclass(slots=True, frozen=True)
class Layer:
    """One layer as the extension reads it; linear layers are the matrices whose outputs lie one after the other.

    Attributes:
        head_norms: of queries and of keys, None where they have none.
        pages, window: as of `NativeAttention.pages`.
    """

    attention_norm: Norm
    qkv: list[StoredMatrix]
    head_norms: list[Norm] | None
    pages: int
    window: int
    output: list[StoredMatrix]
    ffn_norm: Norm
    gate_up: list[StoredMatrix]
    down: list[StoredMatrix]


class NativeDecoder:
    """A model's layers in one call. Made by `of`."""

    def __init__(self, model: Decoder, attention: NativeAttention, layers: list[Layer]) -> None:
        # It owns what the addresses point to.
        self._model, self._attention = model, attention
        self._layers = DecoderLayers(attention.kernel, model.config.hidden, layers)

    @classmethod
    def of(cls, model: Decoder, attention: AttentionBackend) -> NativeDecoder | None:
        """The layers of a model, None if one of them does what the extension has no kernel for.

        Args:
            model: all of it, on one rank.
            attention: its back end.
        """
        if not isinstance(attention, NativeAttention):
            return None
        layers = [_layer(layer, attention.pages(i)) for i, layer in enumerate(model.layers)]
        found = [layer for layer in layers if layer is not None]
        return cls(model, attention, found) if len(found) == len(layers) else None

    def states(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What `Decoder.states` computes, [tokens, hidden]; the attention was told of the step."""
        assert self._model.embedding is not None
        x = self._model.embedding(ids)
        cos, sin = self._model.rope.table(positions)
        self._layers.run(x.data_ptr(), len(x), cos.data_ptr(), sin.data_ptr(), *self._attention.step)
        return x


def _layer(layer: DecoderLayer, at: tuple[int, int]) -> Layer | None:
    own = layer.self_attention
    # A family's layer that computes anything in a way of its own is computed in that way.
    if type(layer).forward is not DecoderLayer.forward or type(layer.ffn) is not GatedFeedForward:
        return None
    if type(own).forward is not SelfAttention.forward or type(own).attend is not SelfAttention.attend:
        return None
    qkv, output, gate_up, down = own.qkv, own.output, layer.ffn.gate_up, layer.ffn.down
    if not (
        isinstance(qkv, NativeLinear)
        and isinstance(output, NativeLinear)
        and isinstance(gate_up, NativeLinear)
        and isinstance(down, NativeLinear)
    ):
        return None
    head_norms = [_norm(norm) for norm in (own.q_norm, own.k_norm) if norm is not None]
    return Layer(
        attention_norm=_norm(layer.attention_norm),
        qkv=qkv.matrices,
        head_norms=head_norms or None,
        pages=at[0],
        window=at[1],
        output=output.matrices,
        ffn_norm=_norm(layer.ffn_norm),
        gate_up=gate_up.matrices,
        down=down.matrices,
    )


def _norm(norm: RMSNorm) -> Norm:
    return norm.weight.data_ptr(), norm.eps
