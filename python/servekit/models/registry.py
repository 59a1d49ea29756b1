"""Which model families there are, and how one is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from servekit.engine.linear import LinearFactory
from servekit.models.bert import Bert, BertConfig
from servekit.models.gguf_file import GgufError, GgufFile
from servekit.models.llama import Llama, LlamaConfig, map_gguf
from servekit.models.weights import SafetensorsWeights, WeightError, open_weights

_T = TypeVar("_T")

HF_ARCHITECTURES = ("LlamaForCausalLM",)
GGUF_ARCHITECTURES = ("llama",)
EMBEDDING_ARCHITECTURES = ("BertModel", "BertForMaskedLM")
"""Architectures of folders whose models make vectors of texts."""


def embeds(path: Path) -> bool:
    """Whether the model in a folder makes vectors and not text.

    Raises:
        WeightError: its configuration can't be read.
    """
    return path.is_dir() and bool(_architectures(_read_json(path)) & set(EMBEDDING_ARCHITECTURES))


def read_config(path: Path) -> LlamaConfig:
    """Sizes of the generating model in a folder or GGUF file.

    Raises:
        WeightError: an unknown architecture, or a file that can't be read.
    """
    if path.is_dir():
        config = _read_json(path)
        if not _architectures(config) & set(HF_ARCHITECTURES):
            raise WeightError(_unknown(", ".join(sorted(_architectures(config)))))
        return _checked(path, lambda: LlamaConfig.from_hf(config))
    return _checked(path, lambda: _read_gguf(path))


def load_model(
    path: Path,
    config: LlamaConfig,
    linear: LinearFactory,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> Llama:
    """Build a generating model with its weights.

    Raises:
        WeightError: the weights are missing, incomplete or of an unknown kind.
    """
    with torch.inference_mode(), open_weights(path, map_gguf) as weights:
        return Llama(config, weights, linear, dtype, device, progress)


def read_embedding_config(path: Path) -> BertConfig:
    """Sizes of the embedding model in a folder.

    Raises:
        WeightError: it can't be read.
    """
    config = _read_json(path)
    return _checked(path, lambda: BertConfig.from_hf(config))


def load_embedding_model(
    path: Path,
    config: BertConfig,
    linear: LinearFactory,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> Bert:
    """Build an embedding model with its weights.

    Raises:
        WeightError: the weights are missing or incomplete.
    """
    with torch.inference_mode():
        return Bert(config, SafetensorsWeights(path), linear, dtype, device, progress)


def _read_gguf(path: Path) -> LlamaConfig:
    with GgufFile(path) as file:
        architecture = file.metadata.get("general.architecture")
        if architecture not in GGUF_ARCHITECTURES:
            raise WeightError(_unknown(str(architecture)))
        return LlamaConfig.from_gguf(file)


def _read_json(path: Path) -> dict[str, Any]:
    config = _checked(path, lambda: json.loads((path / "config.json").read_text()))
    if not isinstance(config, dict):
        raise WeightError(f"{path}/config.json is not a JSON object")
    return config


def _architectures(config: dict[str, Any]) -> set[str]:
    return set(map(str, config.get("architectures") or [f"model_type {config.get('model_type')}"]))


def _checked(path: Path, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except WeightError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, GgufError) as error:
        raise WeightError(f"{path} can't be read: {error}") from error


def _unknown(found: str) -> str:
    return (
        f"architecture {found} is not known; known are {', '.join((*HF_ARCHITECTURES, *EMBEDDING_ARCHITECTURES))} in"
        f" folders and {', '.join(GGUF_ARCHITECTURES)} in GGUF files"
    )
