"""Logprobs of the tokens that were drawn, of the likeliest and of given ones, from logits nobody has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from servekit.engine.device import download, upload
from servekit.engine.plan import Ints, LogprobColumns, Logprobs

_BLOCK = 128
"""Prompt tokens whose logits exist at the same time: those of a long chunk would take gigabytes."""


@dataclass(slots=True, frozen=True)
class DeviceLogprobs:
    """Logprobs as tensors, see `Logprobs`; `sizes` says how many given ids each place has."""

    chosen: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor
    given: torch.Tensor
    sizes: Ints

    def sent(self) -> DeviceLogprobs:
        """The same on their way to the host, see `download`."""
        return DeviceLogprobs(
            download(self.chosen), download(self.top_values), download(self.top_ids), download(self.given), self.sizes
        )

    def fetch(self) -> Logprobs:
        """As arrays; waits for the device if they are still there."""
        given = None
        if self.sizes.any():
            given = np.split(self.given.cpu().numpy(), np.cumsum(self.sizes)[:-1])
        return Logprobs(self.chosen.cpu().numpy(), self.top_values.cpu().numpy(), self.top_ids.cpu().numpy(), given)


def read_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, columns: LogprobColumns, width: int | None = None
) -> DeviceLogprobs:
    """Logprobs of some rows of logits.

    Args:
        logits: [places, vocabulary] float32.
        targets: [places] tokens; a negative one gets any value.
        columns: one entry a place.
        width: likeliest tokens of each place; None takes as many as the place that asks for most.
    """
    total = logits.logsumexp(-1)
    chosen = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0] - total
    width = int(columns.top.max(initial=0)) if width is None else width
    values, ids = logits.topk(min(width, logits.shape[-1]), -1)
    sizes, given = np.zeros(len(columns.at), np.int64), total[:0]
    if columns.ids is not None:
        wanted = [np.zeros(0, np.int64) if row is None else row for row in columns.ids]
        sizes = np.array([len(row) for row in wanted], np.int64)
        rows = upload(np.repeat(np.arange(len(wanted)), sizes), logits.device)
        given = logits[rows, upload(np.concatenate(wanted), logits.device)] - total[rows]
    return DeviceLogprobs(chosen, values - total[:, None], ids, given, sizes)


def read_prompt_logprobs(
    head: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, columns: LogprobColumns
) -> DeviceLogprobs:
    """Logprobs of the tokens that follow some of a step's tokens.

    Args:
        head: makes logits, [n, vocabulary] float32, of n states.
        states: [tokens, hidden], of the whole step.
        columns: with targets; `at` are indices into the states.
    """
    if columns.targets is None:
        raise ValueError("logprobs of a prompt need targets")
    at = upload(columns.at, states.device)
    targets = upload(columns.targets, states.device)
    width, parts = int(columns.top.max(initial=0)), []
    for begin in range(0, len(at), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        ids = None if columns.ids is None else columns.ids[block]
        part = LogprobColumns(columns.at[block], columns.top[block], ids)
        parts.append(read_logprobs(head(states[at[block]]), targets[block], part, width))
    return DeviceLogprobs(
        torch.cat([part.chosen for part in parts]),
        torch.cat([part.top_values for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.given for part in parts]),
        np.concatenate([part.sizes for part in parts]),
    )
