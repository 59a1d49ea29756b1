"""Every family against transformers, whose logits `tests/data/write_family_logits.py` wrote down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from servekit.models.registry import FAMILIES, read_config
from servekit.models.weights import WeightError

from tests.unit.test_models_llama import Engine
from tests.unit.tiny_checkpoints import VARIANTS, sequences, write_checkpoint

GOLDEN = json.loads((Path(__file__).parents[1] / "data/family_logits.json").read_text())


def close(found: torch.Tensor, expected: list[float]) -> None:
    assert torch.allclose(found, torch.tensor(expected), atol=1e-4, rtol=0), (
        (found - torch.tensor(expected)).abs().max()
    )


def check(engine: Engine, variant: str) -> None:
    """Whole prompts, chunks and single tokens, alone and in one batch, give transformers' logits."""
    everyone = [(s, ids, int(at), row) for s, ids in enumerate(sequences()) for at, row in GOLDEN[variant][s].items()]
    for s, ids, at, expected in everyone:
        close(engine.step([(s, 0, ids[: at + 1])])[0], expected)
        for begin in range(0, at + 1, 5):
            found = engine.step([(s, begin, ids[begin : min(begin + 5, at + 1)])])
        close(found[0], expected)
        for i in range(at + 1):
            found = engine.step([(s, i, ids[i : i + 1])])
        close(found[0], expected)
    # The last rows: one prompt at its beginning, one in the middle, one at its last token.
    last = [(s, ids, at, expected) for s, ids, at, expected in everyone if at == len(ids) - 1]
    for starts in ((0, 5, 40), (2, 0, 11), (1, 17, 0)):
        for (s, ids, _, _), start in zip(last, starts, strict=True):
            if start:
                engine.step([(s, 0, ids[:start])])
        rows = [(s, start, ids[start:]) for (s, ids, _, _), start in zip(last, starts, strict=True)]
        for found, (_, _, _, expected) in zip(engine.step(rows), last, strict=True):
            close(found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_folder(tmp_path: Path, variant: str) -> None:
    check(Engine(write_checkpoint(tmp_path / "m", variant)), variant)


def test_every_family_is_tried() -> None:
    tried = {variant["architectures"][0] for variant in VARIANTS.values()}
    assert tried == {family.architecture for family in FAMILIES}


@pytest.mark.parametrize(
    ("variant", "name", "architecture"),
    [("qwen2", "qwen2", gguf.MODEL_ARCH.QWEN2), ("qwen3", "qwen3", gguf.MODEL_ARCH.QWEN3)],
)
def test_gguf(tmp_path: Path, variant: str, name: str, architecture: gguf.MODEL_ARCH) -> None:
    from safetensors.torch import load_file

    folder = write_checkpoint(tmp_path / "m", variant)
    c = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", name)
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    if "head_dim" in c:
        writer.add_key_length(c["head_dim"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    names = gguf.get_tensor_name_map(architecture, c["num_hidden_layers"])
    for hf, tensor in load_file(folder / "model.safetensors").items():
        writer.add_tensor(names.get_name(hf, (".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check(Engine(tmp_path / "m.gguf"), variant)


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("qwen3-moe", {"num_experts": None}, "can't be read"),
        ("qwen3-moe", {"num_experts_per_tok": 7}, "7 of 6 experts"),
        ("llama-yarn", {"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "longrope"),
    ],
)
def test_what_a_file_asks_for_and_can_not_be_had(
    tmp_path: Path, variant: str, change: dict[str, Any], message: str
) -> None:
    folder = write_checkpoint(tmp_path / "m", variant)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError, match=message):
        read_config(folder)
