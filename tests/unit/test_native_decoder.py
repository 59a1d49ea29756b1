"""All layers in one call of the extension: the same bits as the model's modules, whatever the steps."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from servekit._core import DecoderLayers, PagedAttention, SettingError, StoredMatrix
from servekit.engine import native
from servekit.engine.attention import TorchAttention
from servekit.engine.kv_cache import KvPool
from servekit.engine.linear import DenseLinear, choose_linear
from servekit.engine.native_attention import NativeAttention
from servekit.engine.native_decoder import Layer, NativeDecoder
from servekit.engine.plan import Plan, SamplingColumns
from servekit.models.decoder import Decoder
from servekit.models.registry import load_model, read_config

from tests.unit.llama_reference import save_folder
from tests.unit.tiny_models import CASES, VOCABULARY, tensors

pytestmark = pytest.mark.skipif(not native.vectors(), reason="no vector instructions for the kernels here")
CPU = torch.device("cpu")
PAGE = 8
LENGTHS = (1, 30, 300, 530)
"""Tokens of the sequences: within a page, within a chunk of the attention, and over two and three of them."""


def load(folder: Path, case: str, *, stored: bool) -> Decoder:
    """A case's model of sizes that there are kernels for, over the extension's layers or torch's."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 4096}
    config = CASES[case] | sizes
    if not folder.exists():
        save_folder(folder, config, tensors(config))
    read = read_config(folder)
    linear = choose_linear(read.linear_shapes(), float32_only=True)[1] if stored else DenseLinear
    return load_model(folder, read, linear, torch.float32, CPU, lambda done, total: None)


def pool_of(model: Decoder) -> KvPool:
    config = model.config
    return KvPool(config.layers, config.kv_heads, config.head_size, 4 * 70, PAGE, torch.float32, CPU)


def plan(rows: list[tuple[int, int, int]]) -> Plan:
    """A step of rows (sequence, tokens computed before, new tokens), whose pages are scattered over the pool."""
    sequences, starts, counts = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    tables = np.array([1 + s * 70 + np.arange(70) * 3 % 70 for s in sequences])
    ids = [np.random.RandomState(s).randint(0, VOCABULARY, size=600)[start : start + n] for s, start, n in rows]
    none = np.zeros(0, np.float32)
    columns = SamplingColumns(none, none, none, none, none, none)
    return Plan(1, np.concatenate(ids).astype(np.int64), starts, counts, tables, np.arange(len(rows)), columns)


class ByModules:
    """Layer by layer."""

    def __init__(self, model: Decoder, kind: type[NativeAttention] | type[TorchAttention]) -> None:
        config = model.config
        self.model = model
        self.attention = kind(pool_of(model), config.heads, config.head_size, torch.float32, CPU, config.windows)

    def step(self, rows: list[tuple[int, int, int]]) -> torch.Tensor:
        """States of the rows' tokens."""
        step = plan(rows)
        with torch.inference_mode():
            return self.model.states(torch.from_numpy(step.ids), self.attention.begin(step), self.attention)


class AtOnce(ByModules):
    """All layers in one call."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model, NativeAttention)
        found = NativeDecoder.of(model, self.attention)
        assert found is not None
        self.native = found

    def step(self, rows: list[tuple[int, int, int]]) -> torch.Tensor:
        step = plan(rows)
        with torch.inference_mode():
            return self.native.states(torch.from_numpy(step.ids), self.attention.begin(step))


@pytest.mark.parametrize("case", ["llama", "llama-biased", "mistral", "qwen2", "qwen3", "qwen3-windows"])
def test_they_are_the_modules_to_the_last_bit_and_torch_within_rounding(tmp_path: Path, case: str) -> None:
    model = load(tmp_path / "m", case, stored=True)
    at_once, by_modules = AtOnce(model), ByModules(model, NativeAttention)
    by_torch = ByModules(load(tmp_path / "m", case, stored=False), TorchAttention)
    steps = [
        [(0, 0, 1), (1, 0, 15), (2, 0, 150), (3, 0, 265)],
        # A prompt's last token, decoding ones, and more of prompts, one of them over a chunk's end.
        [(3, 265, 100), (0, 1, 1), (2, 150, 150), (1, 15, 1)],
        [(0, 2, 1), (1, 16, 1), (2, 300, 1), (3, 365, 1)],
    ]
    for rows in steps:
        states = at_once.step(rows)
        assert torch.equal(states, by_modules.step(rows))
        assert torch.allclose(states, by_torch.step(rows), atol=1e-4)


@pytest.mark.parametrize("case", ["llama", "mistral"])
def test_a_prompt_is_the_same_at_once_in_chunks_and_token_by_token(tmp_path: Path, case: str) -> None:
    model = load(tmp_path / "m", case, stored=True)
    for n in LENGTHS:
        whole = AtOnce(model).step([(0, 0, n)])
        for sizes in ([1] * n, [7, 100, 23, 256, 1] * 3):
            engine, found = AtOnce(model), []
            starts = np.minimum(np.cumsum([0, *sizes]), n).tolist()
            for begin, end in itertools.pairwise(starts):
                if end > begin:
                    found.append(engine.step([(0, begin, end - begin)]))
            assert torch.equal(torch.cat(found), whole)


def test_what_there_is_no_kernel_for_is_left_to_the_modules(tmp_path: Path) -> None:
    model = load(tmp_path / "m", "qwen3-moe", stored=True)
    assert NativeDecoder.of(model, ByModules(model, NativeAttention).attention) is None
    model = load(tmp_path / "llama", "llama", stored=True)
    assert NativeDecoder.of(model, ByModules(model, TorchAttention).attention) is None
    model = load(tmp_path / "llama", "llama", stored=False)
    assert NativeDecoder.of(model, ByModules(model, NativeAttention).attention) is None


def test_layers_that_do_not_fit_each_other_are_refused() -> None:
    attention = PagedAttention(native.pool(), 2, 1, 16, PAGE)

    def matrices(rows: int, width: int) -> list[StoredMatrix]:
        return native.NativeLinear([native.Stored.filled("F32", rows, width)]).matrices

    def layer(**changes: list[StoredMatrix]) -> Layer:
        fits = {"qkv": matrices(64, 96), "output": matrices(96, 32), "gate_up": matrices(128, 96)}
        fits |= {"down": matrices(96, 64)} | changes
        return Layer(attention_norm=(0, 0.0), head_norms=None, pages=0, window=0, ffn_norm=(0, 0.0), **fits)

    DecoderLayers(attention, 96, [layer()])
    with pytest.raises(SettingError, match=r"gate_up has \(64, 96\) outputs and inputs, expected \(128, 96\)"):
        DecoderLayers(attention, 96, [layer(), layer(gate_up=matrices(64, 96))])
    with pytest.raises(SettingError, match="matrices of one width"):
        DecoderLayers(attention, 96, [layer(output=matrices(64, 32) + matrices(32, 64))])
