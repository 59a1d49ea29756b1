"""The Llama family against a second implementation that knows no cache, no pages, no fused layers and no batch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from servekit.engine.linear import linear_kinds
from servekit.models.registry import read_config
from servekit.models.weights import WeightError

from tests.unit.llama_reference import CONFIG, reference, save_folder, tensors
from tests.unit.model_steps import Engine, check, close
from tests.unit.tiny_gguf import save_gguf

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 16
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "new-style": {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "wide-heads": {"head_dim": 16, "num_key_value_heads": 6},
}


def sequences() -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, 101, size=n).tolist() for n in (1, 2, 9, 17, 30, 41)]


def check_all(engine: Engine, c: dict, w: dict[str, torch.Tensor]) -> None:
    """Every way to compute gives the reference's logits."""
    expected = [reference(c, w, ids) for ids in sequences()]
    check(engine, sequences(), lambda s, position, logits: close(logits, expected[s][position]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_folder(tmp_path: Path, variant: str) -> None:
    c = CONFIG | VARIANTS[variant]
    w = tensors(c)
    check_all(Engine(save_folder(tmp_path / "m", c, w)), c, w)


@pytest.mark.parametrize("kind", ["onednn", "fbgemm-fp16"])
def test_other_linear_layers(tmp_path: Path, kind: str) -> None:
    if kind not in linear_kinds(float32_only=False):
        pytest.skip(f"this torch has no {kind}")
    c = CONFIG | VARIANTS["biased"]
    # Numbers that float16 holds exactly, so that rounded weights are the same weights.
    w = {name: tensor.half().float() for name, tensor in tensors(c).items()}
    check_all(Engine(save_folder(tmp_path / "m", c, w), kind), c, w)


def test_sharded_folder(tmp_path: Path) -> None:
    w = tensors(CONFIG)
    engine = Engine(save_folder(tmp_path / "m", CONFIG, w, shards=3))
    check_all(engine, CONFIG, w)
    assert engine.progress[-1] == (len(w), len(w))
    assert [done for done, _ in engine.progress] == list(range(1, len(w) + 1))


@pytest.mark.parametrize("variant", ["plain", "tied", "biased", "llama3", "wide-heads"])
def test_gguf(tmp_path: Path, variant: str) -> None:
    c = CONFIG | VARIANTS[variant]
    w = tensors(c)
    check_all(Engine(save_gguf(tmp_path / "m.gguf", c, w)), c, w)


def test_bfloat16_checkpoint_is_computed_in_float32(tmp_path: Path) -> None:
    w = {name: tensor.bfloat16() for name, tensor in tensors(CONFIG).items()}
    check_all(Engine(save_folder(tmp_path / "m", CONFIG, w)), CONFIG, w)


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", CONFIG | {"architectures": ["GPT2LMHeadModel"]}, {})
    with pytest.raises(
        WeightError,
        match=r"GPT2LMHeadModel is not known; known are LlamaForCausalLM, .* in folders and llama, .* in GGUF",
    ):
        read_config(folder)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightError, match="mamba is not known"):
        read_config(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 4}, "impossible sizes"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope.* known are linear, dynamic, llama3, yarn"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "for each kind of layer"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "impossible rope"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized by 'fp8'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"hidden_size": "big"}, "can't be read"),
        ({"intermediate_size": 64}, "has the shape"),
        ({"num_hidden_layers": 4}, "lack the tensor 'model.layers.3"),
    ],
)
def test_a_model_that_can_not_be_loaded_says_why(tmp_path: Path, change: dict, message: str) -> None:
    folder = save_folder(tmp_path / "m", CONFIG | change, tensors(CONFIG))
    with pytest.raises(WeightError, match=message) as error:
        Engine(folder)
    assert "\n" not in str(error.value)


def test_damaged_weights_say_so(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", CONFIG, tensors(CONFIG))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(WeightError, match="can't be read"):
        Engine(folder)
    file.unlink()
    with pytest.raises(WeightError, match=r"no \.safetensors file"):
        Engine(folder)


def test_numbers_that_need_a_scale_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    w = tensors(CONFIG)
    w[name] = w[name].to(torch.float8_e4m3fn)
    with pytest.raises(WeightError, match=f"'{name}' is of torch.float8_e4m3fn; known are"):
        Engine(save_folder(tmp_path / "m", CONFIG, w))


def test_an_index_is_held_to_its_files(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", CONFIG, tensors(CONFIG), shards=2)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())

    def write(**changes: str) -> None:
        file.write_text(json.dumps(index | {"weight_map": index["weight_map"] | changes}))

    write(extra="model-00001-of-00002.safetensors")
    with pytest.raises(WeightError, match=r"places tensor 'extra' in model-00001-of-00002.safetensors, which lacks it"):
        Engine(folder)
    write(extra="../../x.safetensors")
    with pytest.raises(WeightError, match="outside its folder"):
        Engine(folder)
    write(extra="model-00003-of-00002.safetensors")
    with pytest.raises(WeightError, match=r"can't be read: .*model-00003"):
        Engine(folder)
    file.write_text("{")
    with pytest.raises(WeightError, match="can't be read"):
        Engine(folder)


def test_a_second_copy_of_the_weights_is_left_alone(tmp_path: Path) -> None:
    w = tensors(CONFIG)
    folder = save_folder(tmp_path / "m", CONFIG, w)
    (folder / "consolidated.safetensors").write_bytes(b"of another layout")
    check_all(Engine(folder), CONFIG, w)


def test_a_head_that_is_not_the_embedding_has_to_be_there(tmp_path: Path) -> None:
    w = tensors(CONFIG)
    del w["lm_head.weight"]
    with pytest.raises(WeightError, match=r"lack the tensor 'lm_head\.weight'"):
        Engine(save_folder(tmp_path / "m", CONFIG, w))


def test_a_gguf_tensor_that_is_missing_goes_by_the_files_name(tmp_path: Path) -> None:
    w = tensors(CONFIG)
    del w["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightError, match=r"lack the tensor 'blk\.1\.ffn_up\.weight'"):
        Engine(save_gguf(tmp_path / "m.gguf", CONFIG, w))


@pytest.mark.parametrize("variant", [{}, {"tie_word_embeddings": True}])
def test_progress_ends_full(tmp_path: Path, variant: dict) -> None:
    c = CONFIG | variant
    # Weights that a tied model does not need, as some checkpoints have.
    engine = Engine(save_folder(tmp_path / "m", c, tensors(CONFIG)))
    total = len(tensors(CONFIG))
    assert engine.progress[-1] == (total, total)
    assert all(before < after for (before, _), (after, _) in itertools.pairwise(engine.progress))
