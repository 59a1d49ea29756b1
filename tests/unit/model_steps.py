"""A model over a small pool, and what must not change its logits: chunks, the cache, the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from servekit.engine.attention import TorchAttention
from servekit.engine.kv_cache import KvPool
from servekit.engine.linear import linear_kinds
from servekit.engine.plan import Plan, SamplingColumns
from servekit.models.registry import load_model, read_config

PAGE = 4

Compare = Callable[[int, int, torch.Tensor], None]
"""Given a sequence's number, a position and its logits, fails if they are wrong."""


class Engine:
    """A model over a small pool; `step` computes the next tokens of some sequences."""

    def __init__(self, path: Path, kind: str = "torch") -> None:
        cpu, self.progress = torch.device("cpu"), []
        config = read_config(path)
        linear = linear_kinds(float32_only=False)[kind]
        self.model = load_model(path, config, linear, torch.float32, cpu, lambda *p: self.progress.append(p))
        pool = KvPool(config.layers, config.kv_heads, config.head_size, 100, PAGE, torch.float32, cpu)
        self.attention = TorchAttention(pool, config.heads, config.head_size, torch.float32, cpu, config.windows)

    def step(self, rows: list[tuple[int, int, list[int]]]) -> torch.Tensor:
        """Logits of each row's last token; a row is (sequence, tokens computed before, new tokens)."""
        starts = np.array([start for _, start, _ in rows])
        counts = np.array([len(ids) for _, _, ids in rows])
        # Pages of a sequence are scattered over the pool, and padded with page 0.
        tables = np.zeros((len(rows), 16), np.int64)
        for row, (sequence, start, ids) in enumerate(rows):
            used = -(-(start + len(ids)) // PAGE)
            tables[row, :used] = 1 + sequence + 6 * ((np.arange(used) * 5) % 16)
        none = np.zeros(0, np.float32)
        columns = SamplingColumns(none, none, none, none, none, none)
        plan = Plan(
            1, np.array([i for _, _, ids in rows for i in ids]), starts, counts, tables, np.arange(len(rows)), columns
        )
        with torch.inference_mode():
            positions = self.attention.begin(plan)
            last = torch.from_numpy(np.cumsum(counts) - 1)
            return self.model(torch.from_numpy(plan.ids), positions, last, self.attention).clone()


def check(engine: Engine, sequences: list[list[int]], compare: Compare) -> None:
    """Prefill, chunked prefill and decode, alone and in one batch, give the right logits.

    Args:
        engine: the model.
        sequences: at most 6, of at most 60 tokens; the second has at least 2.
        compare: knows what is right.
    """
    for s, ids in enumerate(sequences):
        compare(s, len(ids) - 1, engine.step([(s, 0, ids)])[0])
        for n in range(min(len(ids), 12)):
            compare(s, n, engine.step([(s, n, ids[n : n + 1])])[0])
    everyone = list(enumerate(sequences))
    found = engine.step([(s, 0, ids[: max(1, len(ids) // 3)]) for s, ids in everyone])
    for s, ids in everyone:
        compare(s, max(1, len(ids) // 3) - 1, found[s])
    # Longer ones go on with several tokens, the second with all the rest: rows of all kinds in one step.
    rows = [(s, len(ids) // 3, ids[len(ids) // 3 : -1]) for s, ids in everyone if len(ids) > 8]
    second = max(1, len(sequences[1]) // 3)
    rows.append((1, second, sequences[1][second:]))
    for (s, start, ids), logits in zip(rows, engine.step(rows), strict=True):
        compare(s, start + len(ids) - 1, logits)
    rows = [(s, len(ids) - 1, ids[-1:]) for s, ids in everyone]
    for (s, start, _), logits in zip(rows, engine.step(rows), strict=True):
        compare(s, start, logits)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Whether logits are those of the reference, in float32."""
    assert torch.allclose(found.double(), expected, atol=1e-4, rtol=0), (found.double() - expected).abs().max()
