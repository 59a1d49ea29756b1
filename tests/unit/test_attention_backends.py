"""Which back end is taken; FlashInfer's, told what its documentation wants to be told, against torch's."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from servekit.engine.attention import TorchAttention
from servekit.engine.attention_backends import make_attention
from servekit.engine.device import DeviceError
from servekit.engine.flashinfer_attention import FlashInferAttention
from servekit.engine.kv_cache import KvPool
from servekit.engine.plan import Plan, SamplingColumns
from servekit.models.split import ALL, Part

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 64, 4
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Wrapper:
    """FlashInfer's wrapper as its documentation has it, over plain softmax."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(self, *given: Any, causal: bool, window_left: int, q_data_type: Any, kv_data_type: Any) -> None:
        self.row_tokens, self.row_pages, self.pages, self.last, *sizes = given
        assert sizes == [HEADS, KV_HEADS, SIZE, PAGE] and causal
        assert {each.dtype for each in given[:4]} == {torch.int32}
        # Read by the host: on the device they would make it wait.
        assert {each.device for each in (self.row_tokens, self.row_pages, self.last)} == {CPU}
        assert q_data_type == kv_data_type == torch.bfloat16
        self.window = window_left

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        keys, values = cache
        assert q.stride(-1) == 1 and keys.stride() == values.stride() and keys.stride(-1) == 1
        out = torch.empty_like(q)
        for row in range(len(self.last)):
            pages = self.pages[self.row_pages[row] : self.row_pages[row + 1]].long()
            length = (len(pages) - 1) * PAGE + int(self.last[row])
            k, v = (each[pages].flatten(0, 1)[:length].float() for each in (keys, values))
            begin, end = int(self.row_tokens[row]), int(self.row_tokens[row + 1])
            for token in range(begin, end):
                seen = length - (end - 1 - token)
                first = 0 if self.window < 0 else max(0, seen - 1 - self.window)
                for head in range(HEADS):
                    of = head // (HEADS // KV_HEADS)
                    weights = (k[first:seen, of] @ q[token, head].float() / math.sqrt(SIZE)).softmax(-1)
                    out[token, head] = weights @ v[first:seen, of]
        return out


@pytest.mark.parametrize("windows", [[None, None], [3, None], [9, 9]])
def test_flashinfer_sees_what_torch_sees(monkeypatch: pytest.MonkeyPatch, windows: list[int | None]) -> None:
    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    starts, counts = np.array([7, 0, 30, 5, 0, 4]), np.array([1, 5, 1, 6, 1, 4])
    tables = np.zeros((6, 9), np.int64)
    order, at = np.random.default_rng(1).permutation(60) + 1, 0
    for row, used in enumerate(-(-(starts + counts) // PAGE)):
        tables[row, :used] = order[at : at + used]
        at += used
    none = np.zeros(0, np.float32)
    plan = Plan(
        1,
        np.zeros(counts.sum(), np.int64),
        starts,
        counts,
        tables,
        np.arange(6),
        SamplingColumns(none, none, none, none, none, none),
    )
    pools = [KvPool(2, KV_HEADS, SIZE, 60, PAGE, torch.bfloat16, CPU) for _ in range(2)]
    torch.manual_seed(0)
    for ours, theirs in zip(pools[0].layers, pools[1].layers, strict=True):
        ours[1:] = torch.randn(ours[1:].shape)
        theirs.copy_(ours)
    backends = [
        FlashInferAttention(pools[0], HEADS, SIZE, CPU, windows),
        TorchAttention(pools[1], HEADS, SIZE, torch.bfloat16, CPU, windows),
    ]
    positions = [each.begin(plan).tolist() for each in backends]
    assert positions[0] == positions[1]
    for layer in range(2):
        # As they come out of a layer: side by side with keys and values.
        qkv = torch.randn(int(counts.sum()), (HEADS + 2 * KV_HEADS) * SIZE).bfloat16()
        q, kv = qkv[:, : HEADS * SIZE], qkv[:, HEADS * SIZE :].view(-1, 2, KV_HEADS, SIZE)
        found, expected = (each.attend(layer, q.view(-1, HEADS, SIZE), kv) for each in backends)
        assert found.shape == expected.shape == (counts.sum(), HEADS * SIZE)
        assert torch.allclose(found.float(), expected.float(), atol=0.02)
        assert torch.equal(pools[0].layers[layer], pools[1].layers[layer])


@pytest.mark.parametrize(
    ("size", "dtype", "device", "queries", "message"),
    [
        (64, torch.bfloat16, CPU, ALL, "CUDA device"),
        (64, torch.float32, CUDA, ALL, "bfloat16 or float16"),
        (80, torch.bfloat16, CUDA, ALL, "heads of 64, 128, 256, not of 80"),
        (64, torch.bfloat16, CUDA, Part(0, 2), "context-parallel"),
    ],
)
def test_flashinfer_is_refused_where_it_has_no_kernel(
    size: int, dtype: torch.dtype, device: torch.device, queries: Part, message: str
) -> None:
    pool = KvPool(1, 1, size, 1, PAGE, dtype, CPU)
    with pytest.raises(DeviceError, match=message):
        make_attention("flashinfer", pool, 1, size, dtype, device, queries=queries)


def test_flashinfer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    pool = KvPool(1, 1, SIZE, 1, PAGE, torch.bfloat16, CPU)
    with pytest.raises(DeviceError, match=r"pip install 'servekit\[flashinfer\]'"):
        make_attention("flashinfer", pool, 1, SIZE, torch.bfloat16, CUDA)


def test_torch_is_taken_when_it_is_named() -> None:
    pool = KvPool(1, 1, SIZE, 1, PAGE, torch.float32, CPU)
    assert type(make_attention("torch", pool, 1, SIZE, torch.float32, CPU)) is TorchAttention
