"""The torch attention back end against plain softmax, with pages all over the pool."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from servekit.engine import attention as module
from servekit.engine.attention import TorchAttention, group_by_length
from servekit.engine.kv_cache import KvPool
from servekit.engine.plan import Plan, SamplingColumns

HEADS, KV_HEADS, SIZE, PAGE = 6, 2, 8, 4
NONE = np.zeros(0, np.float32)
CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 1, 3, 4, 9, 40])
@pytest.mark.parametrize("waste", [0, 3, 1000])
def test_mixed_rows(monkeypatch: pytest.MonkeyPatch, waste: int, window: int | None) -> None:
    monkeypatch.setattr(module, "_GROUP_WASTE", waste)
    rng = np.random.default_rng(waste)
    pool = KvPool(2, KV_HEADS, SIZE, 200, PAGE, torch.float32, CPU)
    back_end = TorchAttention(pool, HEADS, SIZE, torch.float32, CPU, [None if window else 2, window])
    # Interleaved on purpose: rows with one new token are not neighbours.
    starts = np.array([7, 0, 30, 5, 0, 12, 31, 3])
    counts = np.array([1, 5, 1, 6, 1, 1, 1, 2])
    lengths = starts + counts
    keys = [torch.randn(int(n), 2, KV_HEADS, SIZE) for n in lengths]
    tables = np.zeros((8, 8), np.int64)
    order = rng.permutation(200) + 1
    for row, n in enumerate(lengths):
        used = -(-int(n) // PAGE)
        tables[row, :used] = order[10 * row : 10 * row + used]
        for at in range(int(starts[row])):
            pool.layers[1][tables[row, at // PAGE], at % PAGE] = keys[row][at]
    # What lies in pages of others must not matter.
    for page in order[100:]:
        pool.layers[1][page] = 1e9
    columns = SamplingColumns(NONE, NONE, NONE, NONE, NONE, NONE)
    plan = Plan(1, np.zeros(int(counts.sum()), np.int64), starts, counts, tables, np.arange(8), columns)
    positions = back_end.begin(plan)
    assert positions.tolist() == [s + i for s, n in zip(starts, counts, strict=True) for i in range(n)]
    q = torch.randn(int(counts.sum()), HEADS, SIZE)
    new = torch.cat([keys[row][int(starts[row]) :] for row in range(8)])
    out = back_end.attend(1, q, new).view(-1, HEADS, SIZE)
    at = 0
    for row in range(8):
        for i in range(int(counts[row])):
            seen = int(starts[row]) + i + 1
            for head in range(HEADS):
                kv = keys[row][max(0, seen - (window or seen)) : seen, :, head // (HEADS // KV_HEADS)]
                weights = (kv[:, 0] @ q[at, head] / math.sqrt(SIZE)).softmax(-1)
                assert torch.allclose(out[at, head], weights @ kv[:, 1], atol=1e-5)
            at += 1
    assert not pool.layers[0].any()
    assert not pool.layers[1][0].any()


def test_groups_bound_the_padding() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 3000, size=100)
    rows = np.flatnonzero(rng.random(100) < 0.7)
    groups = group_by_length(rows, lengths)
    assert sorted(np.concatenate(groups).tolist()) == rows.tolist()
    assert all((lengths[g].max() - lengths[g]).sum() <= module._GROUP_WASTE for g in groups)
    assert len(group_by_length(np.arange(50), np.full(50, 77))) == 1
    assert group_by_length(np.zeros(0, np.int64), lengths) == []


def test_a_pool_takes_memory_only_where_it_is_written() -> None:
    pool = KvPool(1, 8, 128, 1 << 15, 16, torch.float32, CPU)
    assert pool.layers[0].shape == ((1 << 15) + 1, 16, 2, 8, 128)
    assert KvPool.token_bytes(1, 8, 128, torch.float32) * 16 * ((1 << 15) + 1) == pool.layers[0].nbytes
    assert pool.layers[0][-1].abs().sum() == 0
