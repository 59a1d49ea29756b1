"""Text to token ids and back, as one model wants it."""

from __future__ import annotations

import array
import asyncio
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tokenizers import Tokenizer

from servekit._core import Encoder, ServekitError
from servekit.config.model_info import ModelInfo
from servekit.tokenizer.pieces import TokenPieces
from servekit.tokenizer.refusal import too_long

LONG_TEXT = 20_000
"""Texts of more characters are tokenized off the event loop: about 5 ms of work."""
REMEMBERED = 32 << 20
"""Most bytes of segments of texts whose ids a worker remembers: some 20,000 turns of conversations."""


class TextEncoder:
    """The model's tokenizer, with the rule for its first token.

    Raises:
        ValueError: the file is no tokenizer.
    """

    def __init__(self, tokenizer_file: str, model_info: ModelInfo) -> None:
        self._file = tokenizer_file
        try:
            self._encoder = Encoder(tokenizer_file, REMEMBERED)
        except ServekitError as error:
            raise ValueError(f"{tokenizer_file}: {' '.join(str(error).split())[:300]}") from None
        self._bos_id = model_info.bos_id
        own = unpack_ids(self._encoder.encode(["a"], True)[0])
        self._adds_bos = self._bos_id is not None and (model_info.add_bos or own[:1] == [self._bos_id])
        self._max_model_len = model_info.max_model_len
        self._max_characters = model_info.max_model_len * self._encoder.longest_token
        threads = max(1, min(4, len(os.sched_getaffinity(0))))
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    def encode_prompts(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of raw prompts, with the special tokens that the model wants around each unless told otherwise.

        Raises:
            Refusal: a text is longer than any that fits the context.
        """
        found = self._encode(texts, add_special_tokens)
        return [self._with_bos(ids) for ids in found] if add_special_tokens else found

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode_prompts`, of one."""
        return self.encode_prompts([text], add_special_tokens)[0]

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what a chat template rendered: the first token is added only if the template left it out.

        Raises:
            Refusal: as for `encode_prompts`.
        """
        return self._with_bos(self._encode([text], False)[0])

    @property
    def cache_counts(self) -> dict[str, int]:
        """What remembering texts was good for, by the names of the worker's numbers on the state page."""
        names = ("cache_lookups", "cache_hits", "cache_tokens", "cache_hit_tokens", "cache_bytes")
        return dict(zip(names, self._encoder.counts, strict=True))

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of ids; unknown ids are nothing."""
        # Unlike `decode`, this lets other threads run meanwhile.
        text: str = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return text

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        """Loaded when ids are first turned into text here, which most workers never do: it takes some 20 MiB."""
        return Tokenizer.from_file(self._file)

    @functools.cached_property
    def pieces(self) -> TokenPieces:
        """Bytes of each token."""
        return TokenPieces(self._tokenizer)

    async def run(self, texts_length: int, function: Any, *args: Any) -> Any:
        """The function's result, computed off the event loop if the texts in it are long."""
        if texts_length <= LONG_TEXT:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        """Stop the threads; what still runs in them is not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        # Seconds and megabytes for a megabyte of text: what can't fit is not tokenized to be counted.
        for text in texts:
            if len(text) > self._max_characters:
                at_least = len(text) * self._max_model_len // self._max_characters
                raise too_long(self._max_model_len, f"at least {at_least}")
        return [unpack_ids(ids) for ids in self._encoder.encode(texts, special)]

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self._adds_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            return [self._bos_id, *ids]
        return ids


def pack_ids(ids: list[int]) -> bytes:
    """Little-endian u32, as ids travel."""
    packed = array.array("I", ids)
    if packed.itemsize != 4:
        raise RuntimeError("this platform has no 4-byte unsigned int")
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`."""
    packed = array.array("I")
    packed.frombytes(data)
    return packed.tolist()


def unpack_floats(data: bytes) -> list[float]:
    """Little-endian f32, as vectors and logprobs travel."""
    packed = array.array("f")
    packed.frombytes(data)
    return packed.tolist()
