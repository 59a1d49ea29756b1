"""Linear layers, and the choice of the fastest kind for this machine.

Which kernel wins depends on the processor and on how the weights are stored: the extension's own kernels read a
quantized file's blocks as they are, fbgemm with weights packed as float16 reads half the bytes, oneDNN with packed
float32 has AVX-512 kernels, and sometimes plain torch is best. `choose_linear` times them on the model's own shapes; a
few hundred milliseconds at start decide about every step afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from servekit.engine import native
from servekit.engine.native import NativeLinear, Stored

_CHECK_ROWS = (1, 16)
"""Batches that are timed; with hundreds of rows all kinds are bound by arithmetic and nearly equal."""
_CHECK_BYTES = 48 << 20
"""Weights that one timing pass walks through: more than the caches hold, as in a real step."""
_CHECK_LAYERS = 64
"""Most matrices in a pass: small ones fit the caches in a real step too."""
_CHECK_SECONDS = 0.2
"""Time for each batch; all kinds share it."""
_CHECK_ROUNDS = 3
"""Passes of every kind, whatever time they take."""


class Linear(Protocol):
    """y = x @ weight.T + bias, for x of shape [rows, in]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DenseLinear:
    """Torch's own linear layer; works for every device and dtype."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDnnLinear:
    """oneDNN with float32 weights in its blocked layout; x is float32 on the CPU.

    Whether a row's result depends on the other rows of its batch is up to the processor.
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        # 16 rows is a hint for the layout: good for decoding, and no worse for prefill.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), 16)
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # On some processors a row alone takes another way through oneDNN, which rounds differently: it gets a mate.
        rows = torch.cat((x, x)) if x.shape[0] == 1 else x
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return out[: x.shape[0]]


class FbgemmLinear:
    """fbgemm with weights packed as float16, arithmetic and activations float32, on the CPU."""

    __slots__ = ("packed",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        bias = None if bias is None else bias.float()
        self.packed: Any = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return out


LinearFactory = Callable[[torch.Tensor, "torch.Tensor | None"], Linear]


class NativeLayers:
    """Makes layers over weights as their file stores them, and of another kind where there is no kernel for that.

    Args:
        otherwise: the other kind.
    """

    def __init__(self, otherwise: LinearFactory) -> None:
        self._otherwise = otherwise

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return self._otherwise(weight, bias)

    def stored(self, parts: Sequence[Stored], bias: torch.Tensor | None) -> Linear:
        """One layer over the outputs of all parts, one after the other."""
        return NativeLinear(parts, bias)


def _plain_native(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    stored = Stored.of(weight)
    return DenseLinear(weight, bias) if stored is None else NativeLinear([stored], bias)


_NATIVE = "native"
_FLOAT32_KINDS: dict[str, LinearFactory] = {"onednn": OneDnnLinear, "torch": DenseLinear}
_FAST_KINDS: dict[str, LinearFactory] = {"fbgemm-fp16": FbgemmLinear, **_FLOAT32_KINDS}


def linear_kinds(float32_only: bool) -> dict[str, LinearFactory]:
    """Kinds of CPU layers over plain weights that this build of torch can run, by name.

    Args:
        float32_only: leave out those that round the weights.
    """
    works = {}
    weight, x = torch.eye(16), torch.ones(1, 16)
    for name, kind in (_FLOAT32_KINDS if float32_only else _FAST_KINDS).items():
        if name == "fbgemm-fp16" and "fbgemm" not in torch.backends.quantized.supported_engines:
            continue
        try:
            if torch.equal(kind(weight, None)(x), x):
                works[name] = kind
        except (RuntimeError, AttributeError):
            # A torch built without this library: the kind is simply not offered.
            continue
    return works


def choose_linear(
    shapes: Sequence[tuple[int, int]], float32_only: bool, stored: str | None = None
) -> tuple[str, LinearFactory]:
    """The kind that is fastest here for weights of these shapes (out, in), over small and large batches alike.

    In float32, the extension's kernels are taken without a race where there are vector instructions for them: their
    rows do not depend on their batch mates, so that a request's tokens don't either. So they are for quantized files on
    processors with AVX2 alone, where they have won with every number of rows: beside a busy neighbour a race could end
    otherwise, and a model's layers would be many calls instead of one.

    Args:
        shapes: of one layer's matrices.
        float32_only: don't round the weights.
        stored: how the file stores most of its weights, by GGUF's name; None if that is not known.
    """
    quantized = stored is not None and stored.startswith("Q") and Stored.known(stored, 256)
    if native.vectors() and (float32_only or (quantized and native.pool().level == "avx2")):
        return _NATIVE, NativeLayers(_plain_native)
    kinds = linear_kinds(float32_only)
    has_native = stored is not None and Stored.known(stored, 256)
    if len(kinds) == 1 and not has_native:
        name = next(iter(kinds))
        return name, kinds[name]
    times = _race(kinds, shapes, stored if has_native else None)
    best = [min(column) for column in zip(*times.values(), strict=True)]
    order = sorted(times, key=lambda n: math.prod(t / b for t, b in zip(times[n], best, strict=True)))
    if order[0] == _NATIVE:
        return _NATIVE, NativeLayers(kinds[order[1]])
    return order[0], kinds[order[0]]


def _race(
    kinds: dict[str, LinearFactory], shapes: Sequence[tuple[int, int]], stored: str | None
) -> dict[str, list[float]]:
    """Seconds of one pass over the weights, for each kind and each of `_CHECK_ROWS`; with `stored`, for native too.

    The kinds take turns and the best pass counts, so that a neighbour's burst of work does not decide.
    """
    order: list[tuple[int, int]] = []
    while sum(4 * out * width for out, width in order) < _CHECK_BYTES and len(order) < _CHECK_LAYERS:
        order += shapes
    base = {shape: torch.empty(shape).uniform_(-0.05, 0.05) for shape in set(shapes)}
    with torch.inference_mode():
        layers: dict[str, list[tuple[int, Linear]]] = {
            name: [(shape[1], kind(base[shape].clone(), None)) for shape in order] for name, kind in kinds.items()
        }
        if stored is not None:
            layers[_NATIVE] = [(width, _native_layer(stored, out, width)) for out, width in order]
        times: dict[str, list[float]] = {name: [] for name in layers}
        for rows in _CHECK_ROWS:
            xs = {width: torch.empty(rows, width).uniform_(-1, 1) for _, width in shapes}
            best, deadline, rounds = dict.fromkeys(layers, math.inf), time.perf_counter() + _CHECK_SECONDS, 0
            while rounds < _CHECK_ROUNDS or time.perf_counter() < deadline:
                for name in layers:
                    start = time.perf_counter()
                    for width, layer in layers[name]:
                        layer(xs[width])
                    best[name] = min(best[name], time.perf_counter() - start)
                rounds += 1
            for name in layers:
                times[name].append(best[name])
    return times


def _native_layer(stored: str, out: int, width: int) -> Linear:
    # Rows that do not fit a format's blocks are stored in another one, which is seldom smaller than this.
    return NativeLinear([Stored.filled(stored if Stored.known(stored, width) else "F16", out, width)])
