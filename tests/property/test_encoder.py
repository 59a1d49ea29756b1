"""Ids of the encoder are those of the library, over real tokenizers, however often texts and their parts come back."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servekit._core import Encoder, ResourceError
from servekit.tokenizer.encoding import unpack_ids
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.property.vocabularies import vocabulary

FORGETFUL = 1 << 12
"""Bytes to remember: so few that texts are forgotten again."""

_number = itertools.count()


class Pair:
    """The library and encoders over one tokenizer.

    Attributes:
        special: texts of its special tokens.
    """

    def __init__(self, library: Tokenizer, file: str | Path) -> None:
        self.library = library
        self.encoders = [Encoder(file, 1 << 20), Encoder(file, FORGETFUL)]
        self.special = [t.content for t in library.get_added_tokens_decoder().values() if t.special]

    def check(self, text: str) -> None:
        for special in (False, True):
            wanted = self.library.encode(text, add_special_tokens=special).ids
            for encoder in self.encoders:
                assert unpack_ids(encoder.encode([text], special)[0]) == wanted


@functools.cache
def real(name: str) -> Pair:
    return Pair(*vocabulary(name))


def texts(pair: Pair) -> st.SearchStrategy[str]:
    """Conversations of turns that come again, between special tokens, whole and broken."""
    broken = [token[:-1] for token in pair.special[:4]] + [token[1:] for token in pair.special[:4]]
    token = st.sampled_from(pair.special)
    words = st.sampled_from(
        ["a", "Hello", " world", "  ", "\n", "\n\n", " \n ", "it's", " 123", "7", "½", "é", "e\u0301", "漢字", "😀",
         "\u200d", "'ll", "<", "|>", " <|", "x" * 70, "Ünder_score", "\t", "\u00a0", "ⅷ", "🇩🇪", "ſ"]
    )  # fmt: skip
    turn = st.lists(words | st.text(max_size=6), max_size=6).map("".join)
    return st.lists(token | turn | st.sampled_from(broken), max_size=12).map("".join)


@pytest.mark.parametrize("name", ["smollm2", "minilm"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_real_tokenizers(name: str, data: st.DataObject) -> None:
    pair = real(name)
    pair.check(data.draw(texts(pair)))


@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_histories_that_grow(name: str) -> None:
    pair = Pair(*vocabulary(name))
    first, second = pair.special[0], pair.special[-1]
    history = ""
    for turn in range(20):
        history += f"{first} user\nWhat is {turn} times 3, und wie heißt das?{second}\n"
        pair.check(history)
    lookups, hits, tokens, hit_tokens, _ = pair.encoders[0].counts
    assert (lookups, hits) >= (40, 38)
    assert hit_tokens > 0.8 * tokens, "each history is asked for twice, and begins with the one before"


def test_which_tokenizers_are_cut_into_words_here() -> None:
    assert real("smollm2").encoders[0].knows_words
    assert not real("minilm").encoders[0].knows_words


def _byte_level(
    pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None
) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", "a"), ("l", "l"), ("Ġ", "Ġ"), ("Ã", "©"), ("1", "2")]
    tokens = [*alphabet, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_SPLIT = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s"), "isolated")

ODD = {
    "gpt2": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix space": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "split": lambda: _byte_level(pre_tokenizers.Sequence([_SPLIT, _BYTES])),
    "digits": lambda: _byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _SPLIT, _BYTES])),
    "removed": lambda: _byte_level(pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), _BYTES])),
    "nfc": lambda: _byte_level(_BYTES, normalizers.NFC()),
    "lower case": lambda: _byte_level(_BYTES, normalizers.Lowercase()),
    "prepended": lambda: _byte_level(_BYTES, normalizers.Prepend("x")),
}
ADDED = {
    "plain": [AddedToken("<s>", special=True), AddedToken("</s>", special=True)],
    "alike": [AddedToken(text, special=True) for text in ("<s>", "<s>a", "a<", " <s>")],
    "normalized": [AddedToken("<s>", special=True), AddedToken("ll", normalized=True)],
    "left": [AddedToken("<s>", special=True), AddedToken("<sp>", special=True, lstrip=True)],
    "right": [AddedToken("<s>", special=True, rstrip=True), AddedToken("</s>", special=True)],
    "words": [AddedToken("<s>", special=True), AddedToken("all", special=True, single_word=True)],
}


@functools.cache
def odd(kind: str, added: str, folder: Path) -> Pair:
    tokenizer = ODD[kind]()
    tokenizer.add_special_tokens([token for token in ADDED[added] if token.special])
    tokenizer.add_tokens([token for token in ADDED[added] if not token.special])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    file = folder / f"{next(_number)}.json"
    tokenizer.save(str(file))
    return Pair(tokenizer, file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("kind", ODD)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_tokenizers_of_every_kind(folder: Path, kind: str, added: str, data: st.DataObject) -> None:
    pair = odd(kind, added, folder)
    pieces = st.sampled_from(
        [
            "<s>",
            "</s>",
            "<sp>",
            "<s>a",
            "a<",
            " <s>",
            "ll",
            "all",
            " ",
            "  ",
            "\n",
            "a",
            "12",
            "é",
            "E\u0301",
            "'s",
            "漢",
            "X",
        ]
    )
    pair.check("".join(data.draw(st.lists(pieces, max_size=12))))


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    for name in ("no.json", "missing.json"):
        with pytest.raises(ResourceError, match=name):
            Encoder(tmp_path / name, 1)
