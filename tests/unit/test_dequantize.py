"""Unpacking of quantized tensors against the `gguf` package's own."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as by_package
from gguf.quants import quantize
from servekit.models.dequantize import dequantize
from servekit.models.gguf_file import GgufTensor

KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("name", KINDS)
def test_equal_to_the_package(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(1).normal(size=(6, 256)).astype(np.float32)
    raw = quantize(values, kind)
    tensor = dequantize(GgufTensor("x", name, int(kind), (6, 256), raw.nbytes, memoryview(raw.tobytes())))
    assert np.array_equal(tensor.float().numpy(), by_package(raw, kind))
    # The copy may be changed, and outlives the file.
    tensor.zero_()


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_kinds_that_the_package_only_reads(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 60, size=(3, 512 // block * size), dtype=np.uint8)
    tensor = dequantize(GgufTensor("x", name, int(kind), (3, 512), raw.nbytes, memoryview(raw.tobytes())))
    assert tensor.shape == (3, 512)
    assert tensor.dtype == torch.float32
    assert np.array_equal(tensor.numpy(), by_package(raw, kind), equal_nan=True)
