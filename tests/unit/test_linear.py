"""The linear layers: right, independent of batch mates where promised, and chosen among those that work here."""

from __future__ import annotations

import pytest
import torch
from servekit.engine.linear import choose_linear, linear_kinds


@pytest.mark.parametrize("kind", linear_kinds(float32_only=False))
def test_results(kind: str) -> None:
    make = linear_kinds(float32_only=False)[kind]
    weight, bias, x = torch.randn(72, 40).half().float(), torch.randn(72), torch.randn(19, 40)
    for b in (None, bias):
        expected = x.double() @ weight.double().T + (0 if b is None else b.double())
        assert torch.allclose(make(weight, b)(x).double(), expected, atol=1e-4)


def test_float32_rows_do_not_depend_on_their_batch() -> None:
    name, make = choose_linear([(3072, 576)], float32_only=True)
    if name != "native":
        pytest.skip("promised where there are vector instructions for the kernels")
    for out, width in ((960, 576), (3072, 576), (576, 1536)):
        layer, x = make(torch.randn(out, width), None), torch.randn(64, width)
        together = layer(x)
        for n in (1, 2, 3, 7, 16, 33):
            assert torch.equal(layer(x[:n]), together[:n])


def test_float32_never_rounds_weights() -> None:
    assert not any("fp16" in name for name in linear_kinds(float32_only=True))
    assert "torch" in linear_kinds(float32_only=True)


def test_the_choice_is_one_that_works() -> None:
    name, make = choose_linear([(96, 64), (64, 96)], float32_only=False)
    assert linear_kinds(float32_only=False)[name] is make
