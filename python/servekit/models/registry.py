"""Which model families there are, and how one is opened."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from servekit.engine.linear import LinearFactory
from servekit.models.bert import Bert, BertConfig
from servekit.models.decoder import Decoder, DecoderConfig, Family
from servekit.models.families import all_families
from servekit.models.gguf_file import GgufError, GgufFile
from servekit.models.split import Cut
from servekit.models.weights import SafetensorsWeights, WeightError, open_weights

if TYPE_CHECKING:
    from servekit.engine.group import StageGroup

_T = TypeVar("_T")

_PLAIN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

EMBEDDING_ARCHITECTURES = ("BertModel", "BertForMaskedLM")
"""Architectures of folders whose models make vectors of texts."""


def embeds(path: Path) -> bool:
    """Whether the model in a folder makes vectors and not text.

    Raises:
        WeightError: its configuration can't be read.
    """
    return path.is_dir() and bool(_architectures(_read_json(path)) & set(EMBEDDING_ARCHITECTURES))


def read_config(path: Path) -> DecoderConfig:
    """Sizes of the generating model in a folder or GGUF file.

    Raises:
        WeightError: an unknown architecture, or a file that can't be read.
    """
    return _read(path)[1]


def stored_format(path: Path) -> str | None:
    """How most weights of a generating model are stored, by GGUF's name; None if its configuration does not say.

    Raises:
        WeightError: a file that can't be read.
    """
    if path.is_dir():
        config = _read_json(path)
        return _PLAIN.get(str(config.get("dtype") or config.get("torch_dtype")))
    return _checked(path, lambda: _most_stored(path))


def load_model(
    path: Path,
    config: DecoderConfig,
    linear: LinearFactory,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None],
    cut: Cut | None = None,
    group: StageGroup | None = None,
) -> Decoder:
    """Build a generating model with its weights; arguments as of `Decoder`.

    Raises:
        WeightError: the weights are missing, incomplete or of an unknown kind.
    """
    family, _ = _read(path)
    with torch.inference_mode(), open_weights(path, family.gguf_sources(config)) as weights:
        return Decoder(config, family.layer, weights, linear, dtype, device, progress, cut, group)


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


def _most_stored(path: Path) -> str:
    sizes: dict[str, int] = {}
    with GgufFile(path) as file:
        for tensor in file.tensors.values():
            sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + math.prod(tensor.shape)
    return max(sizes, key=sizes.__getitem__)


def _read(path: Path) -> tuple[Family, DecoderConfig]:
    if path.is_dir():
        return _checked(path, lambda: _read_folder(path))
    return _checked(path, lambda: _read_gguf(path))


def _read_folder(path: Path) -> tuple[Family, DecoderConfig]:
    config = _read_json(path)
    found = _architectures(config)
    for family in all_families():
        if found & set(family.architectures):
            return family, family.from_hf(config)
    raise WeightError(_unknown(", ".join(sorted(found))))


def _read_gguf(path: Path) -> tuple[Family, DecoderConfig]:
    with GgufFile(path) as file:
        found = file.metadata.get("general.architecture")
        for family in all_families():
            if found in family.gguf:
                return family, family.from_gguf(file)
        raise WeightError(_unknown(str(found)))


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
    except KeyError as error:
        raise WeightError(f"{path / 'config.json' if path.is_dir() else path} lacks {error}") from None
    except (OSError, ValueError, TypeError, AttributeError, GgufError) as error:
        raise WeightError(f"{path} can't be read: {error}") from error


def _unknown(found: str) -> str:
    families = all_families()
    folders = sorted(name for family in families for name in family.architectures)
    files = sorted(name for family in families for name in family.gguf)
    return (
        f"architecture {found} is not known; known are {', '.join((*folders, *EMBEDDING_ARCHITECTURES))} in folders"
        f" and {', '.join(files)} in GGUF files"
    )
