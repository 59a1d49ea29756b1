"""Unpacking of quantized tensors against the `gguf` package's own."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as by_package
from gguf.quants import quantize
from servekit.models import dequantize as module
from servekit.models.dequantize import dequantize
from servekit.models.gguf_file import GgufTensor

WRITTEN = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
READ_ONLY = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]


def tensor_of(name: str, raw: np.ndarray, shape: tuple[int, ...]) -> GgufTensor:
    return GgufTensor("x", name, int(gguf.GGMLQuantizationType[name]), shape, raw.nbytes, memoryview(raw.tobytes()))


@pytest.mark.parametrize("at_once", [256, 1024, 1 << 20])
@pytest.mark.parametrize("name", WRITTEN)
def test_equal_to_the_package(monkeypatch: pytest.MonkeyPatch, name: str, at_once: int) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(1).normal(size=(6, 256)).astype(np.float32)
    raw = quantize(values, kind)
    tensor = dequantize(tensor_of(name, raw, (6, 256)))
    assert np.array_equal(tensor.float().numpy(), by_package(raw, kind))
    # The copy may be changed, and outlives the file.
    tensor.zero_()


@pytest.mark.parametrize("at_once", [256, 1024, 1 << 20])
@pytest.mark.parametrize("name", READ_ONLY)
def test_kinds_that_the_package_only_reads(monkeypatch: pytest.MonkeyPatch, name: str, at_once: int) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    # Every byte comes up, also where it is half of a float16: some are infinite or no number.
    raw = np.random.default_rng(1).integers(0, 256, size=(30, 512 // block * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        tensor, expected = dequantize(tensor_of(name, raw, (30, 512))), by_package(raw, kind)
    assert tensor.shape == (30, 512)
    assert tensor.dtype == torch.float32
    assert np.array_equal(tensor.numpy(), expected, equal_nan=True)
    assert np.isfinite(expected).mean() > 0.8


@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q4_0"])
def test_a_part_is_unpacked_alone(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(1).normal(size=(3, 4, 64)).astype(np.float32)
    whole = tensor_of(name, quantize(values, kind), (3, 4, 64))
    for index in range(3):
        assert torch.equal(dequantize(whole.part(index)), dequantize(whole)[index])
    with pytest.raises(ValueError, match="no part 3"):
        whole.part(3)
    with pytest.raises(ValueError, match="no part 0"):
        whole.part(0).part(0)
