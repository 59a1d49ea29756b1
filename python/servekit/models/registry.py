"""Which model families there are, and how one is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from servekit.engine.linear import LinearFactory
from servekit.models.gguf_file import GgufError, GgufFile
from servekit.models.llama import Llama, LlamaConfig, map_gguf
from servekit.models.weights import WeightError, open_weights

HF_ARCHITECTURES = ("LlamaForCausalLM",)
GGUF_ARCHITECTURES = ("llama",)


def read_config(path: Path) -> LlamaConfig:
    """Sizes of the model in a folder or GGUF file.

    Raises:
        WeightError: an unknown architecture, or a file that can't be read.
    """
    try:
        if path.is_dir():
            config = json.loads((path / "config.json").read_text())
            found = config.get("architectures") or [f"model_type {config.get('model_type')}"]
            if not set(found) & set(HF_ARCHITECTURES):
                raise WeightError(_unknown(", ".join(map(str, found))))
            return LlamaConfig.from_hf(config)
        with GgufFile(path) as file:
            architecture = file.metadata.get("general.architecture")
            if architecture not in GGUF_ARCHITECTURES:
                raise WeightError(_unknown(str(architecture)))
            return LlamaConfig.from_gguf(file)
    except WeightError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, GgufError) as error:
        raise WeightError(f"{path} can't be read: {error}") from error


def load_model(
    path: Path,
    config: LlamaConfig,
    linear: LinearFactory,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> Llama:
    """Build a model with its weights.

    Raises:
        WeightError: the weights are missing, incomplete or of an unknown kind.
    """
    with torch.inference_mode(), open_weights(path, map_gguf) as weights:
        return Llama(config, weights, linear, dtype, device, progress)


def _unknown(found: str) -> str:
    return (
        f"architecture {found} is not known; known are {', '.join(HF_ARCHITECTURES)} in folders"
        f" and {', '.join(GGUF_ARCHITECTURES)} in GGUF files"
    )
