"""Every family's logits against those of transformers, from folders and from GGUF files.

A new family is a case in `tiny_models.py`; `tests/data/write_model_logits.py` asks transformers about it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servekit.engine.plan import Plan, SamplingColumns
from servekit.engine.torch_runner import load_torch_runner
from servekit.models.families import all_families
from servekit.models.registry import read_config
from servekit.models.weights import WeightError

from tests.unit.llama_reference import save_folder
from tests.unit.model_steps import Engine, check, close
from tests.unit.tiny_gguf import save_gguf_case
from tests.unit.tiny_models import CASES, golden_logits, picked, save_case, sequences, tensors


def check_golden(engine: Engine, case: str) -> None:
    expected = golden_logits(case)
    check(engine, sequences(), lambda s, n, logits: close(logits[picked(n)], expected[s][n]))


@pytest.mark.parametrize("case", CASES)
def test_folder(tmp_path: Path, case: str) -> None:
    check_golden(Engine(save_case(tmp_path / "m", case)), case)


@pytest.mark.parametrize(
    "case", ["llama-linear", "llama-llama3", "llama-yarn", "mistral", "qwen2-yarn", "qwen3", "qwen3-moe"]
)
def test_gguf(tmp_path: Path, case: str) -> None:
    check_golden(Engine(save_gguf_case(tmp_path / "m.gguf", case)), case)


@pytest.mark.parametrize("case", ["mistral", "qwen3-moe"])
def test_a_runner_computes_the_same(tmp_path: Path, case: str) -> None:
    folder = save_case(tmp_path / "m", case)
    runner = load_torch_runner(
        folder,
        device="cpu",
        dtype="float32",
        ranks=1,
        rank=0,
        page=4,
        max_model_len=32,
        max_total_tokens=64,
        progress=lambda done, total: None,
    )
    ids = sequences()[-1]
    zero, one = np.zeros(1, np.int64), np.ones(1, np.float32)
    table = np.arange(1, 8)[None]
    sampling = SamplingColumns(one * 0, one, zero, one * 0, zero.astype(np.uint64), zero + len(ids))
    plan = Plan(1, np.array(ids), zero, np.array([len(ids)]), table, zero, sampling)
    expected = Engine(folder).step([(0, 0, ids)])[0].argmax()
    assert runner.collect(runner.launch(plan)).tokens.tolist() == [[int(expected)]]


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("mistral", {"sliding_window": 0}, "impossible sliding windows"),
        ("qwen2", {"layer_types": ["full_attention"]}, "impossible sliding windows of 3 layers"),
        ("qwen3-moe", {"num_experts_per_tok": 7}, "impossible sizes: 7 of 6 experts"),
        ("qwen3-moe", {"num_experts": None}, "lacks 'num_local_experts'"),
    ],
)
def test_a_configuration_that_makes_no_sense_says_why(
    tmp_path: Path, case: str, change: dict[str, Any], message: str
) -> None:
    folder = save_folder(tmp_path / "m", CASES[case] | change, {})
    with pytest.raises(WeightError, match=message):
        read_config(folder)


@pytest.mark.parametrize(("case", "name"), [("qwen2", "self_attn.k_proj.bias"), ("qwen3", "self_attn.q_norm.weight")])
def test_what_makes_a_family_has_to_be_there(tmp_path: Path, case: str, name: str) -> None:
    w = tensors(CASES[case])
    del w["model.layers.1." + name]
    with pytest.raises(WeightError, match=f"lack the tensor 'model.layers.1.{name}'"):
        Engine(save_folder(tmp_path / "m", CASES[case], w))


def test_no_two_families_claim_a_model() -> None:
    for names in ([f.architectures for f in all_families()], [f.gguf for f in all_families()]):
        flat = [name for some in names for name in some]
        assert len(flat) == len(set(flat))


def test_every_family_has_a_case() -> None:
    cases = {name for config in CASES.values() for name in config["architectures"]}
    assert cases == {name for family in all_families() for name in family.architectures}
