"""Draws tokens from logits, all rows at once, and only what a row asks for.

Randomness is a function of (seed, position, token) alone: a hash gives every candidate its Gumbel noise, and the
largest sum of scaled logit and noise wins, which draws from the softmax. So a draw does not depend on the batch, on
earlier steps or on the rank, and a small change of the logits seldom changes it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from servekit.engine.device import upload
from servekit.engine.plan import BAD_LOGITS, Ints, SamplingColumns
from servekit.engine.randomness import draw_keys

GREEDY_BELOW = 1e-5
"""A temperature below that is greedy: dividing by it would overflow."""

_HEAD = 1024
"""Candidates that are sorted first; most nuclei end within them, so a CPU seldom sorts the whole vocabulary."""
_BLOCK_CPU = 4
"""Rows whose noise is made together: their buffers stay in the processor's second cache."""
_BLOCK_CUDA = 64
"""There a block costs a dozen kernels, whatever its size; its buffers are small beside the logits."""


class Sampler:
    """Sampler for one vocabulary size on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._looks = device.type == "cpu"
        self._block = _BLOCK_CPU if self._looks else _BLOCK_CUDA
        self._tokens = _mix(torch.arange(vocab_size, dtype=torch.int32, device=device), None)

    def sample(self, logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
        """Draw one token a row.

        Args:
            logits: [rows, vocabulary] float32; may be overwritten.

        Returns:
            [rows] int64 tokens, `BAD_LOGITS` for a row that is not finite.
        """
        self._adjust(logits, columns)
        top, tokens = self._largest(logits)
        drawn = np.flatnonzero(columns.temperature >= GREEDY_BELOW)
        if len(drawn):
            everyone = len(drawn) == len(columns.temperature)
            index = self._index(drawn)
            scaled = logits if everyone else logits[index]
            scaled /= self._column(columns.temperature[drawn])[:, None]
            self._filter(scaled, columns, drawn)
            tokens[index] = self._draw(scaled, draw_keys(columns.seed[drawn], columns.position[drawn]))
        return torch.where(torch.isfinite(top), tokens, BAD_LOGITS)

    def _largest(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row, and its token; of equal ones, on a CPU the first."""
        if logits.device.type != "cpu":
            top, tokens = logits.max(-1)
            return top, tokens
        # Torch takes ten times as long, and wakes its threads for it.
        tokens = torch.from_numpy(logits.numpy().argmax(-1))
        return logits.gather(-1, tokens[:, None])[:, 0], tokens

    def _adjust(self, logits: torch.Tensor, columns: SamplingColumns) -> None:
        """Apply what changes single logits, in the rows that have any of it."""
        if (p := columns.penalties) is not None:
            at = (self._index(p.rows), self._index(p.ids))
            values, counts = logits[at], self._column(p.counts)
            repetition = self._column(p.repetition)
            values = torch.where(values > 0, values / repetition, values * repetition)
            values -= self._column(p.frequency) * counts + self._column(p.presence) * (counts > 0)
            logits[at] = values
        if (b := columns.biases) is not None:
            logits[self._index(b.rows), self._index(b.ids)] += self._column(b.values)
        for row, ids in enumerate(columns.forbidden or ()):
            if ids is not None:
                logits[row, self._index(ids)] = -math.inf
        for row, mask in enumerate(columns.allowed or ()):
            if mask is not None:
                bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")[: logits.shape[-1]]
                logits[row].masked_fill_(upload(bits == 0, self._device), -math.inf)

    def _column(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return upload(values.astype(np.float32), self._device)

    def _index(self, values: Ints) -> torch.Tensor:
        return upload(values, self._device)

    def _filter(self, scaled: torch.Tensor, columns: SamplingColumns, drawn: npt.NDArray[np.intp]) -> None:
        """Put -inf in place of what top_k, top_p and min_p exclude; equal logits stay or go together."""
        top_k, top_p, min_p = columns.top_k[drawn], columns.top_p[drawn], columns.min_p[drawn]
        vocabulary = scaled.shape[-1]
        top_k = np.where(top_k <= 0, vocabulary, np.minimum(top_k, vocabulary))
        sorting = np.flatnonzero((top_k < vocabulary) | (top_p < 1))
        if len(sorting):
            # Whether a nucleus ends within the head must be looked at, for which the host would wait for a device.
            head = sorting[(top_k[sorting] <= _HEAD) | ((top_k[sorting] == vocabulary) & self._looks)]
            whole = np.setdiff1d(sorting, head)
            if len(head):
                short = self._cut(scaled, head, top_k[head], top_p[head], min(_HEAD, vocabulary))
                whole = np.concatenate((whole, head[short]))
            if len(whole):
                self._cut(scaled, whole, top_k[whole], top_p[whole], vocabulary)
        floors = np.flatnonzero(min_p > 0)
        if len(floors):
            index = self._index(floors)
            rows = scaled[index]
            floor = rows.amax(-1, keepdim=True) + self._column(np.log(np.minimum(min_p[floors], 1)))[:, None]
            scaled[index] = rows.masked_fill_(rows < floor, -math.inf)

    def _cut(
        self,
        scaled: torch.Tensor,
        at: npt.NDArray[np.intp],
        top_k: npt.NDArray[np.int64],
        top_p: npt.NDArray[np.float32],
        width: int,
    ) -> npt.NDArray[np.bool_]:
        """Apply top_k, then top_p among what is left, to the rows `at`, sorting `width` candidates.

        Returns:
            Which rows' nuclei do not end within `width`; these rows are left as they were.
        """
        index = self._index(at)
        rows = scaled[index]
        values = rows.topk(width, -1).values
        k = upload(top_k, self._device)[:, None]
        outside = torch.arange(width, device=self._device) >= k
        kept = values.masked_fill(outside, -math.inf)
        # Without top_k the nucleus is a share of everything, also of what was not sorted.
        total = torch.where(k >= rows.shape[-1], rows.logsumexp(-1, keepdim=True), kept.logsumexp(-1, keepdim=True))
        mass = (kept - total).double().exp_()
        before = mass.cumsum(-1) - mass
        nucleus = ((before < self._column(top_p)[:, None]) & ~outside).sum(-1).clamp_(min=1)
        short = (nucleus == width) & (k[:, 0] > width)
        last = values.gather(-1, (nucleus - 1)[:, None])
        last.masked_fill_(short[:, None], -math.inf)
        scaled[index] = rows.masked_fill_(rows < last, -math.inf)
        if not self._looks:
            return np.zeros(len(at), np.bool_)
        result: npt.NDArray[np.bool_] = short.numpy()
        return result

    def _draw(self, scaled: torch.Tensor, keys: npt.NDArray[np.int32]) -> torch.Tensor:
        noise_keys = upload(keys, self._device)
        out = torch.empty(len(scaled), dtype=torch.int64, device=self._device)
        for start in range(0, len(scaled), self._block):
            block = slice(start, start + self._block)
            bits = _mix(self._tokens ^ noise_keys[0, block, None], noise_keys[1, block, None])
            # 23 bits and a half: exact in float32, never 0 or 1.
            uniform = (bits.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF)).to(torch.float32).add_(0.5).mul_(2.0**-23)
            gumbel = uniform.log_().neg_().log_().neg_()
            torch.argmax(gumbel.add_(scaled[block]), -1, out=out[block])
        return out


def _mix(x: torch.Tensor, key: torch.Tensor | None) -> torch.Tensor:
    """A 32-bit mixer (the multipliers of https://github.com/skeeto/hash-prospector), in place; wraps like u32."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    if key is not None:
        x += key
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x
