"""The Llama family against a second implementation that knows no cache, no pages, no fused layers and no batch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from servekit.engine.attention import TorchAttention
from servekit.engine.kv_cache import KvPool
from servekit.engine.linear import linear_kinds
from servekit.engine.plan import Plan, SamplingColumns
from servekit.models.registry import load_model, read_config
from servekit.models.weights import WeightError

from tests.unit.llama_reference import CONFIG, reference, save_folder, tensors

PAGE = 4
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


def save_gguf(path: Path, c: dict, w: dict[str, torch.Tensor]) -> Path:
    """As llama.cpp's converter does: rotary pairs of q and k side by side."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c["num_hidden_layers"])
    for name, tensor in w.items():
        own = names.get_name(name, (".weight", ".bias"))
        for part, heads in (("q_proj", c["num_attention_heads"]), ("k_proj", c["num_key_value_heads"])):
            if part in name:
                tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(own, tensor.contiguous().numpy())
    if "llama3" in str(c.get("rope_scaling")):
        divisors = []
        for j in range(c["head_dim"] // 2):
            length = 2 * math.pi * c["rope_theta"] ** (2 * j / c["head_dim"])
            smooth = min(max((16 / length - 1) / 3, 0), 1)
            divisors.append(1 / ((1 - smooth) / 8 + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Engine:
    """A model over a small pool; `step` computes the next tokens of some sequences."""

    def __init__(self, path: Path, kind: str = "torch") -> None:
        cpu, self.progress = torch.device("cpu"), []
        config = read_config(path)
        linear = linear_kinds(float32_only=False)[kind]
        self.model = load_model(path, config, linear, torch.float32, cpu, lambda *p: self.progress.append(p))
        pool = KvPool(config.layers, config.kv_heads, config.head_size, 100, PAGE, torch.float32, cpu)
        self.attention = TorchAttention(pool, config.heads, config.head_size, torch.float32, cpu)

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


def sequences() -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, 101, size=n).tolist() for n in (1, 2, 9, 17, 30, 41)]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.allclose(found.double(), expected, atol=1e-4, rtol=0), (found.double() - expected).abs().max()


def check(engine: Engine, c: dict, w: dict[str, torch.Tensor]) -> None:
    """Prefill, chunked prefill and decode, alone and in one batch, give the reference's logits."""
    expected = [reference(c, w, ids) for ids in sequences()]
    for s, ids in enumerate(sequences()):
        close(engine.step([(s, 0, ids)])[0], expected[s][-1])
        for n in range(min(len(ids), 12)):
            close(engine.step([(s, n, ids[n : n + 1])])[0], expected[s][n])
    everyone = list(enumerate(sequences()))
    found = engine.step([(s, 0, ids[: max(1, len(ids) // 3)]) for s, ids in everyone])
    for s, ids in everyone:
        close(found[s], expected[s][max(1, len(ids) // 3) - 1])
    rows = [(s, len(ids) // 3, ids[len(ids) // 3 : -1]) for s, ids in everyone if len(ids) > 8]
    rows.append((1, 1, sequences()[1][1:]))
    for (s, start, ids), logits in zip(rows, engine.step(rows), strict=True):
        close(logits, expected[s][start + len(ids) - 1])
    rows = [(s, len(ids) - 1, ids[-1:]) for s, ids in everyone]
    for (s, start, _), logits in zip(rows, engine.step(rows), strict=True):
        close(logits, expected[s][start])


@pytest.mark.parametrize("variant", VARIANTS)
def test_folder(tmp_path: Path, variant: str) -> None:
    c = CONFIG | VARIANTS[variant]
    w = tensors(c)
    check(Engine(save_folder(tmp_path / "m", c, w)), c, w)


@pytest.mark.parametrize("kind", ["onednn", "fbgemm-fp16"])
def test_other_linear_layers(tmp_path: Path, kind: str) -> None:
    if kind not in linear_kinds(float32_only=False):
        pytest.skip(f"this torch has no {kind}")
    c = CONFIG | VARIANTS["biased"]
    # Numbers that float16 holds exactly, so that rounded weights are the same weights.
    w = {name: tensor.half().float() for name, tensor in tensors(c).items()}
    check(Engine(save_folder(tmp_path / "m", c, w), kind), c, w)


def test_sharded_folder(tmp_path: Path) -> None:
    w = tensors(CONFIG)
    engine = Engine(save_folder(tmp_path / "m", CONFIG, w, shards=3))
    check(engine, CONFIG, w)
    assert engine.progress[-1] == (len(w), len(w))
    assert [done for done, _ in engine.progress] == list(range(1, len(w) + 1))


@pytest.mark.parametrize("variant", ["plain", "tied", "biased", "llama3", "wide-heads"])
def test_gguf(tmp_path: Path, variant: str) -> None:
    c = CONFIG | VARIANTS[variant]
    w = tensors(c)
    check(Engine(save_gguf(tmp_path / "m.gguf", c, w)), c, w)


def test_bfloat16_checkpoint_is_computed_in_float32(tmp_path: Path) -> None:
    w = {name: tensor.bfloat16() for name, tensor in tensors(CONFIG).items()}
    check(Engine(save_folder(tmp_path / "m", CONFIG, w)), CONFIG, w)


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", CONFIG | {"architectures": ["GPT2LMHeadModel"]}, {})
    with pytest.raises(
        WeightError,
        match=r"GPT2LMHeadModel is not known; known are LlamaForCausalLM, .* in folders and llama in GGUF files",
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
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
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
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../x.safetensors"}}))
    with pytest.raises(WeightError, match="outside its folder"):
        Engine(folder)
