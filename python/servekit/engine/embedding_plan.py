"""What a scheduler asks of an embedding runner: one step, as arrays. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from servekit.engine.plan import Floats, Ints


@dataclass(slots=True, frozen=True)
class EmbeddingPlan:
    """Texts to embed together.

    Attributes:
        step: number of the step, from 1.
        ids: [tokens] of the texts, one after the other.
        counts: [texts] tokens of each, at least 1.
    """

    step: int
    ids: Ints
    counts: Ints


class EmbeddingRunner(Protocol):
    """Computes vectors. Several steps may be in flight: results are collected in the order of their launch.

    Attributes:
        info: what it computes with, for logs and `/server_info`.
    """

    info: dict[str, Any]

    def launch(self, plan: EmbeddingPlan) -> Any:
        """Start a step and return its handle. The plan's arrays must not change afterwards."""

    def collect(self, handle: Any) -> Floats:
        """Wait for a step: [texts, size]."""
