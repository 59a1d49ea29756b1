"""What servekit knows about a model before a process loads it, and how that is read from a Hugging Face folder.

HTTP workers import this module: it needs nothing but msgspec.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

END_OF_TURN_TOKENS = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<｜end▁of▁sentence｜>",
        "<EOT>",
    )
)
"""Special tokens that end an answer in every model that has them, even where its files name only one end token."""

_SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (1e-9, 1),
    "top_k": (-1, 1 << 30),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


class ModelError(Exception):
    """A model that can't be found or described. The text is one line for the person who started the server."""


class ModelInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A model as main found it.

    Attributes:
        path: folder, or `.gguf` file.
        format: "folder" or "gguf".
        name: name under which clients ask for it.
        architecture: class name as in config.json (`LlamaForCausalLM`), or GGUF's architecture (`llama`).
        max_model_len: context in tokens, prompt and output together.
        vocab_size: rows of the embedding: ids run from 0 to one less.
        tokenizer_file: `tokenizer.json` that every process loads.
        chat_template: Jinja text; None if the model has none.
        bos_token, eos_token: their texts, as templates ask for them.
        bos_id: the id of `bos_token`.
        add_bos: a plain-text prompt gets `bos_id` in front, the tokenizer does not do it; after a template
            only if the template did not write it.
        end_ids: every id that ends an answer, sorted.
        default_sampling: temperature, top_p, top_k, min_p, repetition_penalty: those that the model's makers name.
    """

    path: str
    format: str
    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    tokenizer_file: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    bos_id: int | None
    add_bos: bool
    end_ids: list[int]
    default_sampling: dict[str, float]


class WeightsInfo(msgspec.Struct, kw_only=True, frozen=True):
    """The part that the network's own files tell; attributes as in `ModelInfo`."""

    architecture: str
    max_model_len: int
    vocab_size: int
    bos_id: int | None
    end_ids: frozenset[int]
    default_sampling: dict[str, float]


class TokenizerInfo(msgspec.Struct, kw_only=True, frozen=True):
    """The part that the tokenizer's files tell; attributes as in `ModelInfo`."""

    tokenizer_file: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    bos_id: int | None
    add_bos: bool
    end_ids: frozenset[int]


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerJson(msgspec.Struct):
    """The few fields of a tokenizer.json that are asked here; msgspec skips its large ones."""

    added_tokens: list[_AddedToken] = []
    post_processor: dict[str, Any] | None = None


def hint_of_gguf(folder: Path) -> str:
    """End of an error line about a folder that holds a GGUF file, which is named itself; else nothing."""
    gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
    return f"; name the file instead: {gguf}" if gguf else ""


def read_weights_info(folder: Path) -> WeightsInfo:
    """Reads config.json and generation_config.json.

    Raises:
        ModelError: config.json is missing, or one of the two is not what it should be.
    """
    config = read_json(folder / "config.json")
    if not config:
        what = "config.json says nothing" if (folder / "config.json").is_file() else "no config.json"
        raise ModelError(f"{folder}: {what}: this is not a model folder{hint_of_gguf(folder)}")
    text_config = config.get("text_config")
    # A model that also sees or hears keeps its language part one level down.
    config = {**text_config, **config} if isinstance(text_config, dict) else config
    generation = read_json(folder / "generation_config.json")
    # An embedding model may have been trained on shorter texts than its positions allow.
    text_length = read_json(folder / "sentence_bert_config.json").get("max_seq_length")
    lengths = (_count(length) for length in (text_length, *(config.get(key) for key in _LENGTH_KEYS)))
    length = next((length for length in lengths if length is not None), None)
    vocab_size = _count(config.get("vocab_size"))
    if vocab_size is None:
        raise ModelError(f"{folder}/config.json: no vocab_size")
    match config.get("architectures"):
        case [str(architecture), *_]:
            pass
        case _:
            architecture = str(config.get("model_type") or "unknown")
    return WeightsInfo(
        architecture=architecture,
        max_model_len=max(_tokenizer_length(folder) if length is None else length, _yarn_length(config)),
        vocab_size=vocab_size,
        bos_id=next(iter(_ids(config.get("bos_token_id"))), None),
        end_ids=_ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
        default_sampling=read_default_sampling(generation),
    )


def read_tokenizer_info(folder: Path, tokenizer_file: Path | None = None) -> TokenizerInfo:
    """Reads the tokenizer's files of a folder.

    Args:
        folder: holds tokenizer.json and beside it tokenizer_config.json, special_tokens_map.json and the chat template.
        tokenizer_file: used instead of the folder's tokenizer.json.

    Raises:
        ModelError: there is no tokenizer.json, or a file is not what it should be.
    """
    tokenizer_file = tokenizer_file or folder / "tokenizer.json"
    config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    try:
        tokenizer = msgspec.json.decode(tokenizer_file.read_bytes(), type=_TokenizerJson)
    except FileNotFoundError as error:
        raise ModelError(f"{folder}: no tokenizer.json") from error
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{tokenizer_file}: not a tokenizer.json: {error}") from error
    ids = {token.content: token.id for token in tokenizer.added_tokens}
    bos_token, eos_token = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    bos_id = ids.get(bos_token) if bos_token else None
    done_by_tokenizer = _first_added_id(tokenizer.post_processor) == bos_id
    special = {token.content: token.id for token in tokenizer.added_tokens if token.special}
    return TokenizerInfo(
        tokenizer_file=str(tokenizer_file),
        chat_template=_read_chat_template(folder, config),
        bos_token=bos_token,
        eos_token=eos_token,
        bos_id=bos_id,
        add_bos=config.get("add_bos_token") is True and bos_id is not None and not done_by_tokenizer,
        end_ids=end_of_turn_ids(special) | frozenset(ids[text] for text in (eos_token,) if text in ids),
    )


def end_of_turn_ids(special: dict[str, int]) -> frozenset[int]:
    """The special tokens that end an answer whatever the configuration says.

    Args:
        special: text to id of all special tokens.
    """
    found = END_OF_TURN_TOKENS & special.keys()
    if "<|return|>" in found:
        # Here <|end|> closes one message of several in an answer.
        found -= {"<|end|>"}
    return frozenset(special[text] for text in found)


def read_default_sampling(generation: dict[str, Any]) -> dict[str, float]:
    """What generation_config.json proposes, without values that can't be.

    Where it asks for greedy decoding its temperature and the like mean nothing; a penalty does.
    """
    found: dict[str, float] = {}
    for name, (low, high) in _SAMPLING_RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (isinstance(value, float) and name != "top_k")) or not low <= value <= high:
            logger.warning("generation_config.json: %s %r is ignored", name, value)
            continue
        found[name] = value
    if generation.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
    if found.get("top_k") == 0:
        found["top_k"] = -1
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file.

    Raises:
        ModelError: the file can't be read or is not a JSON object.
    """
    try:
        found = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: not a JSON object")
    return found


def _read_chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file}: not a template: {error}") from error
    candidates = (read_json(folder / "chat_template.json"), tokenizer_config)
    for template in (candidate.get("chat_template") for candidate in candidates):
        if isinstance(template, str):
            return template
        if isinstance(template, list):
            named = dict(_named_templates(template))
            if named:
                return named.get("default", next(iter(named.values())))
    return None


def _named_templates(entries: list[Any]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(template)}:
                yield name, template


def _first_added_id(post_processor: dict[str, Any] | None) -> int | None:
    """The id that a tokenizer.json's post-processor puts in front of every text."""
    match post_processor:
        case {"type": "Sequence", "processors": [*steps]}:
            found = (_first_added_id(step) for step in steps if isinstance(step, dict))
            return next((first for first in found if first is not None), None)
        case {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": name}}, *_],
            "special_tokens": dict(tokens),
        }:
            match tokens.get(name):
                case {"ids": [int(first), *_]}:
                    return first
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, int(first)]}:
            return first
    return None


def _yarn_length(config: dict[str, Any]) -> int:
    """The context that YaRN stretches a model to, 0 without it: who adds it to a file often leaves the old length."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    match rope:
        case {"rope_type": "yarn"} | {"type": "yarn"}:
            match rope:
                case {"factor": int() | float() as factor, "original_max_position_embeddings": int(original)}:
                    return int(factor * original)
    return 0


def _tokenizer_length(folder: Path) -> int:
    length = read_json(folder / "tokenizer_config.json").get("model_max_length")
    # Without a limit of its own a tokenizer writes 1e30 here.
    if isinstance(length, int) and 0 < length < 1 << 24:
        return length
    raise ModelError(f"{folder}/config.json: no max_position_embeddings")


def _token_text(token: Any) -> str | None:
    """A token is written as its text or as an object with its text and how it is matched."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _ids(value: Any) -> frozenset[int]:
    """An id, a list of ids or nothing."""
    values = value if isinstance(value, list) else [value]
    return frozenset(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
