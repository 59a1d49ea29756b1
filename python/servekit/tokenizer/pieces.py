"""What each token adds to a text by itself, in bytes: a token may be less than a character."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def _byte_level() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable bytes stand for themselves, the other 68 are U+0100 and following.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + i): byte for i, byte in enumerate(others)}}


class TokenPieces:
    """Bytes of the tokens of one tokenizer.

    Attributes:
        strips_start: the first token of a text loses the space that it begins with.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        parts = _decoders(tokenizer)
        kinds = {part["type"] for part in parts}
        self._characters = _byte_level() if "ByteLevel" in kinds else None
        self._spaces = bool(kinds & {"ByteFallback", "Metaspace"})
        self.strips_start = self._spaces and (
            any(part["type"] == "Strip" and part.get("start") for part in parts)
            or any(part["type"] == "Metaspace" and part.get("prepend_scheme") != "never" for part in parts)
        )

    def is_special(self, token: int) -> bool:
        """Whether it is left out of texts without special tokens."""
        return token in self._special

    def piece(self, token: int) -> bytes:
        """Bytes of a token; none for an unknown one."""
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._characters is not None:
            try:
                return bytes([self._characters[char] for char in text])
            except KeyError:
                return text.encode()
        if self._spaces:
            byte = _BYTE.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()
        decoded: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return decoded.encode()


def _decoders(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokenizer's decoders as their JSON says, in order."""
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    parts: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return parts
