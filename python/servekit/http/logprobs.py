"""Logprobs as the routes show them: tokens with their texts, bytes and places."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from servekit.tokenizer.logprobs import Score
from servekit.tokenizer.pieces import TokenPieces

LEAST = -9999.0
"""What stands for a logprob of minus infinity, which JSON has no number for."""


class TokenTexts:
    """Texts of one text's tokens, and where each begins.

    Args:
        pieces: bytes of the tokens.
        skip_special: special tokens are no part of the text.
        offset: characters before the first token.
    """

    def __init__(self, pieces: TokenPieces, skip_special: bool, offset: int = 0) -> None:
        self._pieces = pieces
        self._skip_special = skip_special
        self._offset = offset
        self._started = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> tuple[bytes, int]:
        """Bytes of the next token, and the place of its first character."""
        piece, offset = self._pieces.piece(token), self._offset
        if self._skip_special and self._pieces.is_special(token):
            return piece, offset
        if not self._started and piece:
            self._started = True
            if self._pieces.strips_start:
                piece = piece.removeprefix(b" ")
        self._offset += len(self._decoder.decode(piece))
        return piece, offset

    def label(self, token: int) -> str:
        """Text of a token that might have stood somewhere."""
        return _text(self._pieces.piece(token))

    def raw(self, token: int) -> bytes:
        """Bytes of a token that might have stood somewhere."""
        return self._pieces.piece(token)


def chat_logprobs(scores: Sequence[Score], texts: TokenTexts) -> dict[str, Any]:
    """As the chat route shows them."""
    content = []
    for score in scores:
        piece, _ = texts.next(score.id)
        top = [_entry(texts.raw(token), value) for token, value in score.top]
        content.append({**_entry(piece, score.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(scores: Sequence[Score], texts: TokenTexts) -> dict[str, Any]:
    """As the completions route shows them: lists of the same length. The chosen token is always among the top ones."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for score in scores:
        piece, offset = texts.next(score.id)
        token = _text(piece)
        tokens.append(token)
        offsets.append(offset)
        if score.logprob is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(_finite(score.logprob))
        top: dict[str, float] = {token: _finite(score.logprob)}
        for id_, value in score.top:
            if id_ != score.id:
                # Different tokens may look the same.
                label = texts.label(id_)
                top[f"token_id:{id_}" if label in top else label] = _finite(value)
        tops.append(top)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _entry(piece: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _text(piece), "logprob": _finite(logprob or 0.0), "bytes": list(piece)}


def _finite(value: float) -> float:
    return max(value, LEAST)


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
