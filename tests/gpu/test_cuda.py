"""The engine on a CUDA device: the CPU's tokens, and nothing that makes the host wait. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from servekit.engine.attention_backends import make_attention
from servekit.engine.kv_cache import KvPool
from servekit.engine.plan import LogprobColumns, Plan, SamplingColumns
from servekit.engine.torch_runner import TorchRunner, load_torch_runner
from servekit.models.layers import MixtureOfExperts
from servekit.scheduler.rank import TorchRank

from tests.unit.scheduler_world import config
from tests.unit.test_overlap import Link, request
from tests.unit.tiny_models import VOCABULARY, save_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
PAGE, PAGES = 4, 60


def load(folder: Path, case: str, device: str, dtype: str = "float32") -> TorchRunner:
    path = folder / case if (folder / case).exists() else save_case(folder / case, case)
    sizes = {"ranks": 1, "rank": 0, "page": PAGE, "max_model_len": 64, "max_total_tokens": PAGES * PAGE}
    return load_torch_runner(path, device=device, dtype=dtype, progress=lambda done, total: None, **sizes)  # type: ignore[arg-type]


def serve(runner: TorchRunner) -> Link:
    deliveries = [
        [request(rid, list(range(rid, rid + 3 * rid)), temperature=0.0, max_new_tokens=20, ignore_eos=True)]
        for rid in range(1, 9)
    ]
    deliveries[3].append(request(20, [9, 8, 7], temperature=0.0, repetition_penalty=1.4))
    deliveries[5].append(
        request(21, list(range(5, 15)), {"return_logprob": True, "top_logprobs_num": 2}, temperature=0.0)
    )
    link = Link(deliveries)
    sizes = {"vocab_size": VOCABULARY, "pages": PAGES, "page": PAGE, "max_model_len": 64}
    TorchRank(runner, config(**sizes), rank=0, epoch=1).run(link, link.stop.is_set)  # type: ignore[arg-type]
    return link


@pytest.mark.parametrize("case", ["llama", "llama-dynamic", "mistral", "qwen3", "qwen3-moe"])
def test_tokens_are_those_of_the_cpu(tmp_path: Path, case: str) -> None:
    expected, runner = serve(load(tmp_path, case, "cpu")), load(tmp_path, case, "cuda")
    assert runner.ahead == 1
    # Experts are recorded where they are grouped, which float32 is not.
    assert (runner._graphs is None) == (case == "qwen3-moe")
    for _ in range(2):
        found = serve(runner)
        assert found.ends == expected.ends
        for rid, told in expected.told.items():
            assert found.told[rid]["decode_ids"] == told["decode_ids"], rid
        # And once more without recordings.
        runner._graphs = None


def plan(rows: int) -> Plan:
    """A decoding step whose rows want everything."""
    ints, floats = np.arange(rows), np.ones(rows, np.float32)
    sampling = SamplingColumns(
        floats * 0.7,
        floats * 0.9,
        ints * 0 + 5,
        floats * 0.01,
        ints.astype(np.uint64),
        ints + 9,
        allowed=[None] * (rows - 1) + [np.full(2, 0xFFFF, np.uint32)],
        forbidden=[np.array([1, 2])] + [None] * (rows - 1),
    )
    tables = 1 + np.arange(rows)[:, None] * 2 + np.arange(2)
    logprobs = LogprobColumns(ints, ints * 0 + 3, [np.array([1, 2])] * rows)
    return Plan(1, ints + 3, ints * 0 + 5, ints * 0 + 1, tables, ints, sampling, logprobs)


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3-moe"])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_launch_does_not_wait_for_the_device(tmp_path: Path, case: str, recorded: bool) -> None:
    runner = load(tmp_path, case, "cuda", "bfloat16")
    if case == "qwen3-moe" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("experts are grouped from Hopper on")
    assert runner._graphs is not None
    if not recorded:
        runner._graphs = None
    # The first step of a size sets things up.
    first = runner.collect(runner.launch(plan(6)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        handle = runner.launch(plan(6))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.array_equal(runner.collect(handle).tokens, first.tokens)


def test_grouped_experts_are_experts_one_by_one(tmp_path: Path) -> None:
    on_cuda, on_cpu = load(tmp_path, "qwen3-moe", "cuda", "bfloat16"), load(tmp_path, "qwen3-moe", "cpu")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("experts are grouped from Hopper on")
    grouped, plain = (
        next(module for module in runner._model.modules() if isinstance(module, MixtureOfExperts))
        for runner in (on_cuda, on_cpu)
    )
    assert grouped.grouped is not None
    x = torch.randn(33, 32)
    with torch.inference_mode():
        found, expected = grouped(x.to("cuda", torch.bfloat16)).float().cpu(), plain(x)
    # A token whose experts are a close call may go to another one in bfloat16.
    assert ((found - expected).abs().amax(-1) < 0.05 * expected.abs().max()).float().mean() > 0.8


@pytest.mark.parametrize("windows", [[None, None], [30, None]])
def test_flashinfer_attends_as_torch_does(windows: list[int | None]) -> None:
    pytest.importorskip("flashinfer")
    heads, kv_heads, size, page, cuda = 8, 2, 64, 16, torch.device("cuda", 0)
    starts, counts = np.array([70, 0, 300, 50, 0, 33]), np.array([1, 50, 1, 60, 1, 1])
    none, tables = np.zeros(0, np.float32), 1 + np.arange(6 * 20).reshape(6, 20)
    columns = SamplingColumns(none, none, none, none, none, none)
    step = Plan(1, np.zeros(counts.sum(), np.int64), starts, counts, tables, np.arange(6), columns)
    pools = [KvPool(2, kv_heads, size, 120, page, torch.bfloat16, cuda) for _ in range(2)]
    for ours, theirs in zip(pools[0].layers, pools[1].layers, strict=True):
        ours[1:] = torch.randn(ours[1:].shape, device=cuda)
        theirs.copy_(ours)
    backends = [
        make_attention(name, pool, heads, size, torch.bfloat16, cuda, windows)
        for name, pool in zip(("flashinfer", "torch"), pools, strict=True)
    ]
    for each in backends:
        each.begin(step)
    for layer in range(2):
        qkv = torch.randn(int(counts.sum()), heads + 2 * kv_heads, size, device=cuda).bfloat16()
        q, kv = qkv[:, :heads], qkv[:, heads:].view(-1, 2, kv_heads, size)
        found, expected = (each.attend(layer, q, kv) for each in backends)
        assert torch.allclose(found.float(), expected.float(), atol=0.03)
