"""Every family's logits against those of transformers, from folders and from GGUF files.

A new family is a case in `tiny_models.py`; `tests/data/write_model_logits.py` asks transformers about it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from servekit.models.families import all_families

from tests.unit.model_steps import Engine, check, close
from tests.unit.tiny_gguf import save_gguf_case
from tests.unit.tiny_models import CASES, golden_logits, picked, save_case, sequences


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


def test_every_family_has_a_case() -> None:
    cases = {name for config in CASES.values() for name in config["architectures"]}
    assert cases == {name for family in all_families() for name in family.architectures}
