"""What each token adds to a text, for the decoders that models have."""

from __future__ import annotations

import pytest
from servekit.http.logprobs import TokenTexts
from servekit.tokenizer.pieces import TokenPieces
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEXT = "Zoë says 漢字 \U0001f600\n\tand  more"


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for char in "Zosay\u2581andmre":
        vocab.setdefault(char, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_pieces_add_up_to_the_text_and_offsets_point_into_it(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    pieces = TokenPieces(tokenizer)
    ids = tokenizer.encode(TEXT).ids
    texts = TokenTexts(pieces, skip_special=True)
    found = [texts.next(token) for token in ids]
    assert b"".join(piece for piece, _ in found).decode() == TEXT
    offsets = [offset for _, offset in found]
    assert offsets == sorted(offsets)
    for piece, offset in found:
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            continue
        assert TEXT[offset : offset + len(text)] == text


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_special_tokens_take_room_only_where_they_are_shown(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    pieces = TokenPieces(tokenizer)
    special = tokenizer.token_to_id("<|end|>")
    assert pieces.is_special(special)
    assert pieces.piece(special) == b"<|end|>"
    ids = [special, *tokenizer.encode("a").ids[-1:]]
    for skip, offset in ((True, 0), (False, 7)):
        texts = TokenTexts(pieces, skip)
        assert [texts.next(token)[1] for token in ids] == [0, offset]


def test_unknown_ids_are_nothing() -> None:
    pieces = TokenPieces(byte_level())
    assert pieces.piece(10**6) == b""
    assert not pieces.is_special(10**6)


def test_other_decoders_are_asked_token_by_token() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "ab": 1, "##c": 2}, "[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    pieces = TokenPieces(tokenizer)
    assert pieces.piece(1) == b"ab"
