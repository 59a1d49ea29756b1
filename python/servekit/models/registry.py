"""Which model families there are, and how one is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from servekit.engine.linear import LinearFactory
from servekit.models.bert import Bert, BertConfig
from servekit.models.family import Family
from servekit.models.gguf_file import GgufError, GgufFile
from servekit.models.llama import Llama, LlamaConfig
from servekit.models.mistral import MISTRAL
from servekit.models.qwen2 import QWEN2
from servekit.models.qwen3 import QWEN3
from servekit.models.qwen3_moe import QWEN3_MOE
from servekit.models.weights import SafetensorsWeights, WeightError, open_weights

_T = TypeVar("_T")

FAMILIES = (Family("LlamaForCausalLM", gguf="llama", interleaved=True), MISTRAL, QWEN2, QWEN3, QWEN3_MOE)
"""Families of generating models."""
EMBEDDING_ARCHITECTURES = ("BertModel", "BertForMaskedLM")
"""Architectures of folders whose models make vectors of texts."""


def embeds(path: Path) -> bool:
    """Whether the model in a folder makes vectors and not text.

    Raises:
        WeightError: its configuration can't be read.
    """
    return path.is_dir() and bool(_architectures(_read_json(path)) & set(EMBEDDING_ARCHITECTURES))


def find_family(path: Path) -> Family:
    """The family of the generating model in a folder or GGUF file.

    Raises:
        WeightError: an unknown architecture, or a file that can't be read.
    """
    if path.is_dir():
        names = _architectures(_read_json(path))
        found = next((family for family in FAMILIES if family.architecture in names), None)
    else:
        names = {_checked(path, lambda: _gguf_architecture(path))}
        found = next((family for family in FAMILIES if family.gguf in names), None)
    if found is None:
        raise WeightError(_unknown(", ".join(sorted(names))))
    return found


def read_config(path: Path) -> LlamaConfig:
    """Sizes of the generating model in a folder or GGUF file.

    Raises:
        WeightError: an unknown architecture, or a file that can't be read.
    """
    family = find_family(path)
    if path.is_dir():
        config = _read_json(path)
        return _checked(path, lambda: family.read(config))
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
    family = find_family(path)
    with torch.inference_mode(), open_weights(path, family.map_gguf) as weights:
        return Llama(config, weights, linear, dtype, device, progress, family.layer)


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


def _gguf_architecture(path: Path) -> str:
    with GgufFile(path) as file:
        return str(file.metadata.get("general.architecture"))


def _read_gguf(path: Path) -> LlamaConfig:
    with GgufFile(path) as file:
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
    folders = ", ".join((*(family.architecture for family in FAMILIES), *EMBEDDING_ARCHITECTURES))
    files = ", ".join(family.gguf for family in FAMILIES if family.gguf)
    return f"architecture {found} is not known; known are {folders} in folders and {files} in GGUF files"
