"""Makes one `tokenizer.json` out of the tokenizer that a GGUF file describes in its metadata.

Two of GGUF's tokenizer models are known: `gpt2` (byte-level BPE, with the pre-tokenizers below) and `llama`
(SentencePiece BPE with byte fallback). Each other model or pre-tokenizer is an error that names it: a tokenizer that is
nearly right gives prompts that are quietly wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from servekit.config.model_info import END_OF_TURN_TOKENS
from servekit.models.gguf_file import GgufError, GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"
# Time and memory grow with the square of a token's length; real ones have a few dozen characters.
_LONGEST_TOKEN = 1024

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _gpt4(letters: str, digits: str) -> str:
    """GPT-4's way: contractions, a word with the sign before it, digits, signs with the line ends after them."""
    other = rf"[^\s{letters}\p{{N}}]+"
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?{other}[\r\n]*|{_LINES_AND_SPACES}"


def _cased(suffix: str, digits: str) -> str:
    """Words end where lower case meets upper case."""
    word = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{word}[{_UPPER}]*[{_LOWER}]+{suffix}|{word}[{_UPPER}]+[{_LOWER}]*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
    )


class _PreTokenizer(NamedTuple):
    """How text is cut before merging.

    Attributes:
        cuts: patterns, applied one after the other; each makes every match, and what lies between, a piece of its own.
        whole_words: a piece that is in the vocabulary is one token, whatever the merges say.
        add_bos: whether a prompt starts with the BOS token if the file does not say.
    """

    cuts: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_LLAMA3 = _PreTokenizer((_gpt4(r"\p{L}", r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_DIGIT_BY_DIGIT = _PreTokenizer((r"\p{N}", _GPT2))
_PLAIN = _PreTokenizer((_GPT2,))
_QWEN2 = _PreTokenizer((_gpt4(r"\p{L}", r"\p{N}"),))
_SMAUG = _PreTokenizer((_gpt4(r"\p{L}", r"\p{N}{1,3}"),))
_GPT4O = _PreTokenizer((_cased(f"{_CONTRACTION}?", r"\p{N}{1,3}"),))
_DEEPSEEK_V3 = _PreTokenizer(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        + _LINES_AND_SPACES,
    )
)

_FAMILIES: tuple[tuple[_PreTokenizer, str], ...] = (
    (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_DIGIT_BY_DIGIT, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (_PLAIN, "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4"),
    (_QWEN2, "qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open megrez kormo grok-2"),
    (_PreTokenizer((_gpt4(r"\p{L}\p{M}", r"\p{N}"),)), "qwen35"),
    (_SMAUG, "smaug-bpe dbrx glm4 chatglm-bpe"),
    (_GPT4O, "gpt-4o llama4 kanana2 minimax-m2"),
    (_PreTokenizer((_cased("", r"\p{N}"),), whole_words=True, add_bos=True), "tekken"),
    (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense"),
    (
        _PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")),
        "deepseek-coder",
    ),
    (_PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (_PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
)
_PRE_TOKENIZERS = {name: rules for rules, names in _FAMILIES for name in names.split()}


def write_tokenizer_json(file: GgufFile, target: Path) -> None:
    """Writes the file's tokenizer to `target`.

    It adds no BOS of its own, see `adds_bos`. Special tokens are those that the file calls control or unknown.

    Raises:
        GgufError: the file has no tokenizer, a damaged one, or one of an unknown kind.
        OSError: `target` can't be written.
    """
    tokenizer = build_tokenizer(file)
    # Written by hand because the library reports a failure as a bare Exception.
    target.write_text(tokenizer.to_str(), encoding="utf-8")


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Like `write_tokenizer_json`, but returns the tokenizer."""
    model = file.metadata.get("tokenizer.ggml.model")
    vocabulary = _vocabulary(file)
    if model == "gpt2":
        tokenizer = _byte_level(file, vocabulary)
    elif model == "llama":
        tokenizer = _sentencepiece(file, vocabulary)
    else:
        raise GgufError(f"{file.path}: the tokenizer model {model!r} is not supported")
    _add_special_tokens(file, tokenizer, list(vocabulary))
    return tokenizer


def adds_bos(file: GgufFile) -> bool:
    """Whether a raw prompt starts with the BOS token."""
    said = file.metadata.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    if file.metadata.get("tokenizer.ggml.model") == "llama":
        return True
    known = _PRE_TOKENIZERS.get(_pre_tokenizer_name(file))
    return known is not None and known.add_bos


def special_token_texts(file: GgufFile) -> dict[str, int]:
    """The text and id of every special token."""
    tokens = _strings(file, "tokens")
    return {tokens[token_id]: token_id for token_id, special in _added_tokens(file, tokens) if special}


def _vocabulary(file: GgufFile) -> dict[str, int]:
    tokens = _strings(file, "tokens")
    # A file may hold several unused empty tokens; each needs a text of its own.
    vocabulary = {token or f"[EMPTY_{index}]": index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise GgufError(f"{file.path}: tokenizer.ggml.tokens holds the same token twice")
    return vocabulary


def _byte_level(file: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
    name = _pre_tokenizer_name(file)
    if name not in _PRE_TOKENIZERS:
        raise GgufError(f"{file.path}: the pre-tokenizer {name!r} is not supported")
    rules = _PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(
        BPE(vocab=vocabulary, merges=list(_listed_merges(file, vocabulary)), ignore_merges=rules.whole_words)
    )
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.cuts]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer_name(file: GgufFile) -> str:
    return str(file.metadata.get("tokenizer.ggml.pre", "default"))


def _listed_merges(file: GgufFile, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    for merge in _strings(file, "merges"):
        left, _, right = merge.partition(" ")
        # Some files list merges of tokens that they don't have; such a merge can never happen.
        if left in vocabulary and right in vocabulary and left + right in vocabulary:
            yield left, right


def _sentencepiece(file: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokens = list(vocabulary)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise GgufError(f"{file.path}: tokenizer.ggml.unknown_token_id {unknown!r} is no token")
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_scored_merges(file, vocabulary),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    escape = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape]) if prefix else escape
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _scored_merges(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece lists no merges: it joins the neighbours whose joint token has the highest score."""
    scores = _numbers(file, "scores", len(vocabulary))
    found = []
    for token, index in vocabulary.items():
        if len(token) > _LONGEST_TOKEN:
            raise GgufError(f"{file.path}: token {index} has {len(token)} characters")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], -vocabulary[left], -vocabulary[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _add_special_tokens(file: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    added = [
        AddedToken(tokens[token_id], special=special, normalized=False)
        for token_id, special in _added_tokens(file, tokens)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def _added_tokens(file: GgufFile, tokens: list[str]) -> Iterator[tuple[int, bool]]:
    """Ids of the tokens that are found in a text before anything else, and whether they are special."""
    if "tokenizer.ggml.token_type" not in file.metadata:
        return
    types = _numbers(file, "token_type", len(tokens))
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        # Some conversions leave the end of a turn among the ordinary tokens.
        if kind in (_CONTROL, _UNKNOWN) or token in END_OF_TURN_TOKENS:
            yield token_id, True
        elif kind == _USER_DEFINED:
            yield token_id, False


def _strings(file: GgufFile, key: str) -> list[str]:
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise GgufError(f"{file.path}: tokenizer.ggml.{key} is missing or no list of strings")
    return found


def _numbers(file: GgufFile, key: str, count: int) -> list[float]:
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or len(found) < count or not all(isinstance(item, int | float) for item in found):
        raise GgufError(f"{file.path}: tokenizer.ggml.{key} is missing or no list of {count} numbers")
    return found[:count]
