"""What stands in a tokenizer's place under `--skip-tokenizer-init`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from servekit.tokenizer.encoding import TextEncoder
from servekit.tokenizer.pieces import TokenPieces
from servekit.tokenizer.refusal import Refusal


class NoTokenizer(TextEncoder):
    """Lets ids pass and refuses text."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def encode_prompts(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Nothing of nothing.

        Raises:
            Refusal: there is a text.
        """
        if texts:
            raise _refusal()
        return []

    def encode_rendered(self, text: str) -> list[int]:
        """Refused.

        Raises:
            Refusal: always.
        """
        raise _refusal()

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Refused.

        Raises:
            Refusal: always.
        """
        raise _refusal()

    @property
    def cache_counts(self) -> dict[str, int]:
        """Nothing is remembered."""
        return {}

    @property
    def pieces(self) -> TokenPieces:
        """Refused.

        Raises:
            Refusal: always.
        """
        raise _refusal()


def _refusal() -> Refusal:
    what = "this server runs without a tokenizer (--skip-tokenizer-init)"
    return Refusal(400, f"{what}: send token ids, and ask for token ids")
