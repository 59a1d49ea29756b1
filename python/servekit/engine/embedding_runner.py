"""The runner that computes vectors of texts with torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from servekit.engine.device import choose_device, choose_dtype, share_threads
from servekit.engine.embedding_plan import EmbeddingPlan
from servekit.engine.linear import DenseLinear, LinearFactory, choose_linear
from servekit.engine.plan import Floats
from servekit.models.bert import Bert
from servekit.models.pooling import Pooling, read_pooling
from servekit.models.registry import load_embedding_model, read_embedding_config


class TorchEmbeddingRunner:
    """A model and how its states become vectors; `info` says what was chosen for them."""

    def __init__(self, model: Bert, pooling: Pooling, device: torch.device, info: dict[str, Any]) -> None:
        self.info = info
        self._model, self._pooling, self._device = model, pooling, device

    def launch(self, plan: EmbeddingPlan) -> torch.Tensor:
        """Compute a step; on CUDA it runs while the caller goes on."""
        with torch.inference_mode():
            ids = torch.from_numpy(plan.ids).to(self._device)
            return self._pooling(self._model(ids, plan.counts), plan.counts)

    def collect(self, handle: torch.Tensor) -> Floats:
        """Vectors of a launched step, [texts, size]."""
        found: Floats = handle.cpu().numpy()
        return found


def load_embedding_runner(
    path: Path,
    *,
    device: str,
    dtype: str,
    ranks: int,
    rank: int,
    progress: Callable[[int, int], None],
) -> TorchEmbeddingRunner:
    """Load a model from a folder; arguments as of `load_torch_runner`.

    On a CPU, auto means exact float32 weights: vectors are compared with those that others made.

    Raises:
        WeightError: the model can't be read.
        DeviceError: there is no such device.
    """
    began = time.monotonic()
    where = choose_device(device, rank)
    share_threads(where, ranks)
    config, pooling = read_embedding_config(path), read_pooling(path)
    kind = choose_dtype(dtype, where)
    name: str = "torch"
    linear: LinearFactory = DenseLinear
    if where.type == "cpu" and kind == torch.float32:
        name, linear = choose_linear(Bert.linear_shapes(config), float32_only=True)
    model = load_embedding_model(path, config, linear, kind, where, progress)
    info = {
        "device": str(where),
        "dtype": str(kind).removeprefix("torch."),
        "linear": name,
        "threads": torch.get_num_threads() if where.type == "cpu" else 0,
        "vocab_size": config.vocab_size,
        "context": config.context,
        "embedding_size": config.hidden,
        "normalized": pooling.normalize,
    }
    runner = TorchEmbeddingRunner(model, pooling, where, info)
    # The first text does not pay for set-up.
    runner.collect(runner.launch(EmbeddingPlan(0, np.zeros(2, np.int64), np.array([2]))))
    info["load_seconds"] = round(time.monotonic() - began, 2)
    return runner
