"""How much of a long prompt a step may compute beside requests that decode: their next tokens wait for all of it."""

from __future__ import annotations

SHORT = 256
"""Tokens of a prompt that are computed as fast as they can be, whoever waits."""
STRETCH = 1.8
"""How many times longer than without the long prompt a step may get."""
LEAST = 8
"""Tokens that a long prompt gets in every step."""
UNKNOWN = 64
"""Tokens that it gets while nothing has been measured."""
_WEIGHT = 0.2


class Pace:
    """Learns from the steps how long they take."""

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._token_s: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of long prompts that a step may compute beside decoding requests, from `LEAST` on."""
        if self._decode_s is None or self._token_s is None:
            return UNKNOWN
        return max(LEAST, int((STRETCH - 1) * self._decode_s / self._token_s))

    def step_took(self, seconds: float, decoded: int, prompt_tokens: int) -> None:
        """Take in how long a step took that computed the next tokens of `decoded` requests and so many of prompts."""
        if not prompt_tokens:
            self._decode_s = _towards(self._decode_s, seconds)
            return
        rest = seconds - (self._decode_s or 0.0 if decoded else 0.0)
        if rest > 0:
            self._token_s = _towards(self._token_s, rest / prompt_tokens)


def _towards(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)
