"""The extension's kernels against torch: stored weights, attention over pages, what lies between."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as by_package
from servekit import _core
from servekit.engine import linear, native
from servekit.engine.attention import TorchAttention
from servekit.engine.attention_backends import make_attention
from servekit.engine.kv_cache import KvPool
from servekit.engine.linear import NativeLayers, choose_linear
from servekit.engine.native_attention import NativeAttention
from servekit.engine.plan import Plan, SamplingColumns

CPU = torch.device("cpu")
WIDTH = 512
FORMATS = [name for name, _, _ in _core.KernelPool.formats]


def stored(name: str, rows: int, rng: np.random.Generator) -> tuple[native.Stored, torch.Tensor]:
    """Random weights in a format, and what the `gguf` package reads in them."""
    kind = GGMLQuantizationType[name]
    weights, size = next((w, s) for n, w, s in _core.KernelPool.formats if n == name)
    blocks = rng.integers(0, 256, (rows, WIDTH // weights, size), np.uint8)
    scales = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}.get(name, [])
    for at in scales:
        halves = rng.uniform(-0.05, 0.05, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    if not scales:
        plain = torch.from_numpy(rng.uniform(-1, 1, (rows, WIDTH)).astype(np.float32))
        plain = plain.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name])
        found = native.Stored.of(plain)
        assert found is not None
        assert found.format == name
        return found, plain.double()
    raw = blocks.reshape(rows, -1)
    return native.Stored(name, torch.from_numpy(raw), WIDTH), torch.from_numpy(by_package(raw, kind)).double()


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_stored_weights_and_a_row_depends_on_nothing_else(name: str) -> None:
    rng = np.random.default_rng(1)
    (a, plain_a), (b, plain_b) = stored(name, 70, rng), stored(name, 13, rng)
    x, bias = torch.from_numpy(rng.uniform(-1, 1, (23, WIDTH)).astype(np.float32)), torch.randn(83)
    layer = native.NativeLinear([a, b], bias)
    expected = x.double() @ torch.cat((plain_a, plain_b)).T + bias.double()
    together = layer(x)
    size = x.double().abs() @ torch.cat((plain_a, plain_b)).abs().T + 1
    assert ((together.double() - expected).abs() / size).max() < 1e-6
    for count in (1, 2, 5, 6, 7):
        assert torch.equal(layer(x[:count]), together[:count])


def test_parts_in_different_formats_lie_side_by_side() -> None:
    rng = np.random.default_rng(2)
    parts = [stored(name, rows, rng) for name, rows in (("Q4_K", 5), ("Q6_K", 9), ("Q6_K", 2))]
    x, bias = torch.randn(3, WIDTH), torch.randn(16)
    out = native.NativeLinear([part for part, _ in parts], bias)(x)
    expected = x.double() @ torch.cat([plain for _, plain in parts]).T + bias.double()
    assert torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-3)


def test_a_layer_refuses_rows_of_another_width() -> None:
    layer = native.NativeLinear([native.Stored.filled("Q8_0", 4, 64)])
    with pytest.raises(ValueError, match="rows of 64 got"):
        layer(torch.zeros(1, 32))
    with pytest.raises(_core.SettingError, match="no multiple"):
        _core.StoredMatrix(native.pool(), "Q4_K", 0, 0, 1, 64)
    with pytest.raises(_core.SettingError, match="no kernel"):
        _core.StoredMatrix(native.pool(), "IQ3_S", 0, 0, 1, 256)


def test_native_layers_win_where_the_file_is_quantized_or_another_kind_stands_in() -> None:
    name, make = choose_linear([(96, 64), (64, 96)], float32_only=True, stored="Q8_0")
    assert (name == "native") == isinstance(make, NativeLayers)
    assert make(torch.eye(64))(torch.ones(1, 64)).shape == (1, 64)


@pytest.mark.skipif(native.pool().level != "avx2", reason="known of AVX2 alone")
def test_a_neighbours_load_does_not_decide_how_a_quantized_model_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_race", lambda *args: pytest.fail("timed"))
    assert choose_linear([(96, 64)], float32_only=False, stored="Q4_1")[0] == "native"


def test_norm_sum_rotation_and_gate() -> None:
    for rows, width in ((1, 40), (3, 577), (200, 576)):
        x, y, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
        d = x.double()
        expected = d / (d.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        assert torch.allclose(native.rms_norm(x, weight, 1e-5).double(), expected, atol=1e-5)
        both = torch.cat((x, y), -1) * 4
        gate, up = both.double().chunk(2, -1)
        assert torch.allclose(native.silu_mul(both).double(), gate / (1 + (-gate).exp()) * up, atol=1e-5)
        expected = x + y
        assert torch.equal(native.add_(x, y), expected)
    heads, size = 5, 20
    x, angles = torch.randn(7, heads + 2, size), torch.randn(7, size // 2)
    cos, sin = angles.cos(), angles.sin()
    low, high = x[:, :heads, : size // 2].clone(), x[:, :heads, size // 2 :].clone()
    rest = x[:, heads:].clone()
    native.rotate_(x[:, :heads], torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    expected = torch.cat((low * cos[:, None] - high * sin[:, None], high * cos[:, None] + low * sin[:, None]), -1)
    assert torch.allclose(x[:, :heads], expected, atol=1e-6)
    assert torch.equal(x[:, heads:], rest)


def attention_plan(lengths: list[int], page: int, counts: list[int] | None = None) -> Plan:
    """Some new tokens for each sequence, one if nothing is said, whose pages are scattered over the pool."""
    lengths_, counts_ = np.array(lengths), np.array(counts or [1] * len(lengths))
    held = -(-lengths_ // page)
    tables, free = np.zeros((len(lengths), held.max()), np.int64), np.random.default_rng(3).permutation(held.sum()) + 1
    for row, (begin, count) in enumerate(zip(np.cumsum(held) - held, held, strict=True)):
        tables[row, :count] = free[begin : begin + count]
    n = len(lengths)
    ones, off = np.ones(n, np.int64), np.zeros(n, np.float32)
    columns = SamplingColumns(off, off + 1, ones * 0, off, ones.astype(np.uint64), ones)
    ids = np.ones(counts_.sum(), np.int64)
    return Plan(1, ids, lengths_ - counts_, counts_, tables, np.arange(n), columns)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page", "window"),
    [
        (9, 3, 64, 16, None),
        (4, 4, 16, 4, None),
        (10, 1, 48, 8, 300),
        (8, 2, 128, 16, 20),
    ],
)
def test_attention_reads_pages_as_torch_does(
    heads: int, kv_heads: int, size: int, page: int, window: int | None
) -> None:
    lengths = [1, 3, 17, 256, 257, 700, 5, 280, 700, 1000]
    plan = attention_plan(lengths, page, [1, 1, 1, 1, 1, 1, 5, 60, 9, 1000])
    pages, tokens = int(plan.tables.max()), len(plan.ids)
    windows = None if window is None else [window]
    results = []
    q, kv = torch.randn(tokens, heads, size), torch.randn(tokens, 2, kv_heads, size)
    content = torch.randn(pages + 1, page, 2, kv_heads, size)
    for kind in (TorchAttention, NativeAttention):
        pool = KvPool(1, kv_heads, size, pages, page, torch.float32, CPU)
        pool.layers[0][1:] = content[1:]
        attention = kind(pool, heads, size, torch.float32, CPU, windows or ())
        attention.begin(plan)
        results.append((attention.attend(0, q, kv), pool.layers[0]))
    assert torch.allclose(results[0][0], results[1][0], atol=2e-5)
    assert torch.equal(results[0][1], results[1][1])


def test_attention_of_a_sequence_does_not_depend_on_the_others() -> None:
    plan = attention_plan([600, 5, 40], 16)
    pool = KvPool(1, 3, 64, int(plan.tables.max()), 16, torch.float32, CPU)
    pool.layers[0].normal_()
    attention = NativeAttention(pool, 9, 64, torch.float32, CPU)
    q, kv = torch.randn(3, 9, 64), torch.randn(3, 2, 3, 64)
    attention.begin(plan)
    together = attention.attend(0, q, kv)
    for row in range(3):
        one = slice(row, row + 1)
        alone = Plan(
            1, plan.ids[one], plan.starts[one], plan.counts[one], plan.tables[one], np.zeros(1, np.int64), plan.sampling
        )
        attention.begin(alone)
        assert torch.equal(attention.attend(0, q[one], kv[one]), together[one])


def test_heads_that_there_is_no_kernel_for_are_torchs() -> None:
    pool = KvPool(1, 1, 24, 4, 4, torch.float32, CPU)
    assert type(make_attention("auto", pool, 1, 24, torch.float32, CPU)) is TorchAttention
    with pytest.raises(_core.SettingError, match="multiples of 16"):
        _core.PagedAttention(native.pool(), 1, 1, 24, 4)
