"""Rotary positions, and the ways in which they are stretched beyond the context that a model was trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

KNOWN = ("linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    Attributes:
        type: one of `KNOWN`.
        factor: how much longer.
        original_context: tokens of the trained context.
        low_freq_factor, high_freq_factor: of llama3, which leaves high frequencies as they are.
        beta_fast, beta_slow: of yarn: turns within the trained context above and below which frequencies are left as
            they are, or divided by the factor.
        attention_factor: of yarn: multiplies queries and keys; None is what its authors found best.
    """

    type: str
    factor: float
    original_context: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.type not in KNOWN:
            raise ValueError(f"rope scaling {self.type!r} is not known; known are {', '.join(KNOWN)}")

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied with."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return _yarn_magnitude(self.factor, 1.0)


def read_rope_scaling(rope: dict[str, Any], context: int) -> RopeScaling | None:
    """Scaling from the RoPE part of a `config.json`, None if there is none.

    Args:
        rope: `rope_parameters` or `rope_scaling`.
        context: the model's `max_position_embeddings`.

    Raises:
        KeyError: the factor is missing.
        ValueError: an unknown kind.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    original = rope.get("original_max_position_embeddings")
    factor = rope["factor"]
    if factor is None and original:
        factor = context / original
    magnitude = rope.get("attention_factor")
    if magnitude is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        whole, part = (_yarn_magnitude(factor, float(rope[key])) for key in ("mscale", "mscale_all_dim"))
        magnitude = whole / part
    return RopeScaling(
        kind,
        factor,
        # Dynamic scaling begins where the model's context ends.
        context if original is None or kind == "dynamic" else original,
        rope.get("low_freq_factor", 1.0),
        rope.get("high_freq_factor", 4.0),
        rope.get("beta_fast") or 32.0,
        rope.get("beta_slow") or 1.0,
        magnitude,
    )


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_frequencies(
    head_size: int, base: float, scaling: RopeScaling | None = None, divisors: torch.Tensor | None = None
) -> torch.Tensor:
    """Radians a position, [head size / 2] float32, within the trained context.

    Args:
        divisors: [head size / 2], as a GGUF file brings them in place of a llama3 scaling.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / base**exponents
    if divisors is not None:
        return frequencies / divisors.float()
    if scaling is None or scaling.type == "dynamic":
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type == "llama3":
        wavelength = 2 * math.pi / frequencies
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    else:
        # YaRN (https://arxiv.org/abs/2309.00071): by how often a frequency turns within the trained context.
        first, last = (
            head_size * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), head_size - 1)
        ramp = (torch.arange(head_size // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
        keep = 1 - ramp.clamp(0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


class Rope(nn.Module):  # type: ignore[misc]
    """Rotary positions, halves rotated against each other (https://arxiv.org/abs/2104.09864).

    Args:
        head_size, base, scaling, divisors: see `rope_frequencies`.
        dtype, device: of the tables.
    """

    def __init__(
        self,
        head_size: int,
        base: float,
        scaling: RopeScaling | None,
        divisors: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.frequencies: torch.Tensor
        self.register_buffer(
            "frequencies", rope_frequencies(head_size, base, scaling, divisors).to(device), persistent=False
        )
        self._head_size, self._base, self._dtype = head_size, base, dtype
        self._magnitude = 1.0 if scaling is None else scaling.magnitude
        self._dynamic = scaling if scaling is not None and scaling.type == "dynamic" else None

    def table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine of [tokens] positions, each [tokens, 1, head size]; one table serves all layers."""
        places = positions.float()[:, None]
        angles = places * (self.frequencies if self._dynamic is None else self._stretched(places, self._dynamic))
        cos, sin = angles.cos(), angles.sin()
        if self._magnitude != 1:
            cos, sin = cos * self._magnitude, sin * self._magnitude
        return (
            torch.cat((cos, cos), -1)[:, None].to(self._dtype),
            torch.cat((-sin, sin), -1)[:, None].to(self._dtype),
        )

    def _stretched(self, places: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
        """Frequencies of each token, [tokens, head size / 2]: those that its own length of the sequence asks for.

        A token's keys stay as they were made, as in a sequence that grows token by token, so that they depend neither
        on chunks nor on what follows.
        """
        size = self._head_size
        length = (places + 1).clamp(min=scaling.original_context) / scaling.original_context
        bases = self._base * (scaling.factor * length - (scaling.factor - 1)) ** (size / (size - 2))
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=places.device) / size
        return 1.0 / bases**exponents


def rotate_(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Apply a rotary table in place to x of shape [tokens, heads, head size]."""
    cos, sin = table
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)
