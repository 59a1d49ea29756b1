"""Ids of the encoder are those of the library, over real tokenizers, however often texts and their parts come back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servekit._core import Encoder
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from servekit.tokenizer.encoding import unpack_ids
from tests.property.vocabularies import tokenizer_file

SMALL = 1 << 12
"""Bytes that are remembered: so few that texts are forgotten again."""


class Pair:
    """The library and the encoder over one tokenizer."""

    def __init__(self, path: Path, remembered: int = 1 << 20) -> None:
        self.library = Tokenizer.from_file(str(path))
        self.library.no_truncation()
        self.library.no_padding()
        self.encoder = Encoder(path, remembered)
        self.special = [t.content for t in self.library.get_added_tokens_decoder().values() if t.special]

    def check(self, text: str) -> None:
        for special in (False, True):
            wanted = self.library.encode(text, add_special_tokens=special).ids
            assert unpack_ids(self.encoder.encode([text], special)[0]) == wanted
