"""What a scheduler asks of a model runner: one step, as arrays. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

NO_TOKEN = -1
"""A row that was not to be sampled: its prompt is not complete yet."""
BAD_LOGITS = -2
"""A row whose logits hold NaN or infinity."""


@dataclass(slots=True, frozen=True)
class SamplingColumns:
    """How the sampled rows of a plan are drawn; every column has one entry per sampled row.

    Attributes:
        temperature: 0 is greedy.
        top_p, min_p: in [0, 1]; 1 and 0 are off.
        top_k: most candidates; 0 is off.
        seed: u64.
        position: index in its sequence of the token that is drawn; with the seed it determines the draw.
        forbidden: per row the ids that must not be drawn, or None; the whole column is None where no row has any.
    """

    temperature: Floats
    top_p: Floats
    top_k: Ints
    min_p: Floats
    seed: npt.NDArray[np.uint64]
    position: Ints
    forbidden: list[Ints | None] | None = None


@dataclass(slots=True, frozen=True)
class Plan:
    """One step: for each row, the next tokens of one sequence to compute and where its KV pages are.

    Attributes:
        step: number of the step, from 1.
        ids: [tokens] the rows' new tokens, one row after the other.
        starts: [rows] tokens of the sequence that are in the KV pool already.
        counts: [rows] new tokens, at least 1.
        tables: [rows, width] page numbers in order; unused entries are 0, the padding page.
        sampled: indices of the rows that get a token: those whose known tokens end with this step.
        sampling: columns for the sampled rows.
    """

    step: int
    ids: Ints
    starts: Ints
    counts: Ints
    tables: Ints
    sampled: Ints
    sampling: SamplingColumns


class ModelRunner(Protocol):
    """Computes steps. Several may be in flight: results are collected in the order of their launch.

    Attributes:
        info: what it computes with, for logs and `/server_info`.
    """

    info: dict[str, Any]

    def launch(self, plan: Plan) -> Any:
        """Start a step and return its handle. The plan's arrays must not change afterwards."""

    def collect(self, handle: Any) -> Ints:
        """Wait for a step: [rows, k] new tokens, `NO_TOKEN` where there is none, `BAD_LOGITS` for a failed row."""
