"""Rotary positions (https://arxiv.org/abs/2104.09864), and how they are stretched beyond the context of a training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from servekit.engine import native
from servekit.models.weights import WeightError

_SCALINGS = ("linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Which frequencies a model's heads turn with.

    Attributes:
        base: of the geometric row of wavelengths.
        scaling: None, or linear, dynamic, llama3 or yarn.
        factor: how much longer than trained.
        original_context: tokens that the model was trained on before it was stretched.
        low_freq_factor, high_freq_factor: of llama3, the bounds between which it goes over to stretching.
        beta_fast, beta_slow: of yarn, the same in turns within the original context.
        truncate: of yarn, whether these bounds are rounded to whole dimensions.
        attention_factor: of yarn, what queries and keys are multiplied with.
    """

    base: float = 10000.0
    scaling: str | None = None
    factor: float = 1.0
    original_context: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.scaling is not None and self.scaling not in _SCALINGS:
            raise WeightError(f"rope scaling {self.scaling!r} is not known; known are {', '.join(_SCALINGS)}")
        if min(self.base, self.factor, self.original_context) <= 0:
            raise WeightError(
                f"impossible rope: base {self.base}, factor {self.factor}, original context {self.original_context}"
            )

    @classmethod
    def from_hf(cls, config: dict[str, Any], context: int) -> RopeParameters:
        """From a folder's `config.json`.

        Args:
            context: the model's longest sequence, where nothing else is said of the original one.

        Raises:
            KeyError, WeightError: something is missing or unknown.
        """
        # Newer files gather everything about RoPE in one place.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if any(isinstance(value, dict) for value in rope.values()):
            raise WeightError("rope parameters for each kind of layer are not known: only one set for all")
        partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise WeightError(f"partial_rotary_factor {partial} is not known: heads turn as a whole")
        base = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "default":
            return cls(base)
        if kind == "dynamic":
            # It starts where the context ends, whatever else the file says.
            return cls(base, kind, rope["factor"], context)
        original = (
            config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or context
        )
        if kind != "yarn":
            low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
            return cls(base, kind, rope["factor"], original, low, high)
        factor = rope.get("factor") or context / original
        return cls(
            base,
            kind,
            factor,
            original,
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            truncate=rope.get("truncate", True),
            attention_factor=_attention_factor(rope, factor),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], head_size: int, context: int) -> RopeParameters:
        """From a GGUF file's metadata; arguments and errors as of `from_hf`."""
        at = f"{metadata['general.architecture']}.rope."
        turned = metadata.get(at + "dimension_count", head_size)
        if turned != head_size:
            raise WeightError(f"{at}dimension_count {turned} is not known: heads of {head_size} turn as a whole")
        base = metadata.get(at + "freq_base", 10000.0)
        kind = metadata.get(at + "scaling.type", "linear")
        # An older key, which says both.
        factor = metadata.get(at + "scaling.factor") or metadata.get(at + "scale_linear")
        if kind == "none" or not factor:
            return cls(base)
        stretched = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        return cls(
            base,
            kind,
            factor,
            metadata.get(at + "scaling.original_context_length", context),
            beta_fast=metadata.get(at + "scaling.yarn_beta_fast", 32.0),
            beta_slow=metadata.get(at + "scaling.yarn_beta_slow", 1.0),
            attention_factor=metadata.get(at + "scaling.attn_factor", 1.0) * stretched if kind == "yarn" else 1.0,
        )

    def frequencies(self, head_size: int) -> torch.Tensor:
        """Radians a position, [head size / 2] float32; of dynamic scaling those within the original context."""
        plain = 1.0 / self.base ** _exponents(head_size)
        if self.scaling == "linear":
            return plain / self.factor
        if self.scaling == "llama3":
            turns = self.original_context * plain / (2 * math.pi)
            keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        elif self.scaling == "yarn":
            keep = 1 - self._ramp(head_size)
        else:
            return plain
        keep = keep.clamp(0, 1)
        return plain * keep + plain / self.factor * (1 - keep)

    def _ramp(self, head_size: int) -> torch.Tensor:
        """How much each dimension is stretched by yarn (https://arxiv.org/abs/2309.00071), below 0 and above 1 too."""

        def dimension(turns: float) -> float:
            """The one that makes so many turns within the original context."""
            return head_size * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_size - 1)
        return (torch.arange(head_size // 2) - low) / (high - low or 0.001)


def _exponents(head_size: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size


def _attention_factor(rope: dict[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1)


class Rope(nn.Module):  # type: ignore[misc]
    """Turns the halves of heads against each other.

    Args:
        parameters: of the model.
        head_size: of the model.
        divisors: [head size / 2], by which a GGUF file divides the frequencies, or None.
        dtype, device: of the tables.
    """

    def __init__(
        self,
        parameters: RopeParameters,
        head_size: int,
        divisors: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        frequencies = parameters.frequencies(head_size)
        if divisors is not None:
            frequencies = frequencies / divisors.float()
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)
        self._rope, self._head_size, self._dtype = parameters, head_size, dtype

    def table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine of [tokens] positions, each [tokens, 1, head size]; one table serves all layers."""
        frequencies = self.frequencies
        if self._rope.scaling == "dynamic":
            frequencies = self._dynamic(positions)
        angles = positions.float()[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        factor = self._rope.attention_factor
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return (
            torch.cat((cos, cos), -1)[:, None].to(self._dtype),
            torch.cat((-sin, sin), -1)[:, None].to(self._dtype),
        )

    def _dynamic(self, positions: torch.Tensor) -> torch.Tensor:
        """Frequencies of each token, [tokens, head size / 2].

        Behind the original context the base grows with a token's own position, as it does where tokens are generated
        one by one. Growing it with the whole sequence instead would make a token's key depend on those that follow,
        and no cached prefix could be shared.
        """
        p, d = self._rope, self._head_size
        length = (positions + 1).clamp(min=p.original_context)
        growth = (p.factor * length / p.original_context - (p.factor - 1)) ** (d / (d - 2))
        return 1.0 / (p.base * growth[:, None]) ** _exponents(d, positions.device)


def rotate_(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Apply a rotary table in place to x of shape [tokens, heads, head size]."""
    cos, sin = table
    if native.serves(x):
        native.rotate_(x, cos, sin)
        return
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)
