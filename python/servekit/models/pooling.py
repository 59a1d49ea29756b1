"""From the states of a text's tokens to its vector, as a sentence-transformers folder says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from servekit.engine.plan import Ints
from servekit.models.weights import WeightError

_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """How texts become vectors.

    Attributes:
        mode: `mean` of the tokens' states, the first token's (`cls`), or the `last` token's.
        normalize: vectors have length 1.
    """

    mode: str = "mean"
    normalize: bool = True

    def __call__(self, states: torch.Tensor, counts: Ints) -> torch.Tensor:
        """Vectors of texts, [texts, hidden] float32.

        Args:
            states: [tokens, hidden], texts side by side.
            counts: [texts] tokens of each.
        """
        ends = np.cumsum(counts)
        if self.mode == "mean":
            pooled = torch.stack([part.float().mean(0) for part in states.split(counts.tolist())])
        else:
            at = ends - 1 if self.mode == "last" else ends - counts
            pooled = states[torch.from_numpy(at).to(states.device)].float()
        return F.normalize(pooled, dim=-1) if self.normalize else pooled


def read_pooling(folder: Path) -> Pooling:
    """What `modules.json` and the pooling's own configuration say; without them the mean, normalized.

    Raises:
        WeightError: the folder asks for what is not known here.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return Pooling()
    try:
        modules = [(module["type"].rpartition(".")[2], module["path"]) for module in json.loads(file.read_text())]
        unknown = [name for name, _ in modules if name not in ("Transformer", "Pooling", "Normalize")]
        if unknown:
            raise WeightError(
                f"{file}: module {unknown[0]!r} is not known; known are Transformer, Pooling and Normalize"
            )
        mode = "mean"
        for name, path in modules:
            if name == "Pooling":
                mode = _read_mode(folder / path / "config.json")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, WeightError):
            raise
        raise WeightError(f"{file} can't be read: {error}") from error
    return Pooling(mode, any(name == "Normalize" for name, _ in modules))


def _read_mode(file: Path) -> str:
    config = json.loads(file.read_text())
    asked = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if len(asked) == 1 and asked[0] in _MODES:
        return _MODES[asked[0]]
    raise WeightError(
        f"{file}: pooling {', '.join(asked) or 'of no kind'} is not known; known is one of {', '.join(_MODES)}"
    )
