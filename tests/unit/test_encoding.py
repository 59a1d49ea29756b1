"""Text to ids: special tokens, the first token, and threads for long texts."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from servekit.tokenizer.encoding import LONG_TEXT, TextEncoder, pack_ids, unpack_ids
from servekit.tokenizer.refusal import Refusal
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.api.fakes import BOS, CONTEXT, make_config

BOS_ID = 256


def encoder(folder: Path, *, own_bos: bool = False, **model: Any) -> TextEncoder:
    config = make_config(folder, model=model)
    path = config.port_args.tokenizer_file
    if own_bos:
        tokenizer = Tokenizer.from_file(path)
        tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
        tokenizer.save(path)
    return TextEncoder(path, config.model_info)


@pytest.mark.parametrize(
    ("setting", "added"),
    [({}, False), ({"add_bos": True}, True), ({"own_bos": True}, True), ({"own_bos": True, "add_bos": True}, True)],
)
def test_the_first_token_comes_once(tmp_path: Path, setting: dict[str, bool], added: bool) -> None:
    made = encoder(tmp_path, **setting)
    raw = made.encode_prompt("ab", add_special_tokens=False)
    assert BOS_ID not in raw
    with_bos = [BOS_ID, *raw] if added else raw
    assert made.encode_prompt("ab") == with_bos
    assert made.encode_rendered("ab") == with_bos
    assert made.encode_rendered(BOS + "ab") == [BOS_ID, *raw]


def test_there_and_back(tmp_path: Path) -> None:
    made = encoder(tmp_path)
    for text in ("plain", "é e\u0301 漢字 😀\n\t", "<|im_end|>"):
        assert made.decode(made.encode_prompt(text)) == text
    assert made.decode(made.encode_prompt("a<|im_end|>"), skip_special_tokens=True) == "a"


def test_long_texts_leave_the_loop_alone(tmp_path: Path) -> None:
    made = encoder(tmp_path)

    async def run(size: int) -> threading.Thread:
        thread: threading.Thread = await made.run(size, threading.current_thread)
        return thread

    assert asyncio.run(run(LONG_TEXT)) is threading.main_thread()
    assert asyncio.run(run(LONG_TEXT + 1)) is not threading.main_thread()
    made.close()


def test_what_can_not_fit_is_refused_without_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = encoder(tmp_path)
    # The longest token, <|im_start|>, has 12 characters.
    assert len(made.encode_prompt("<|im_start|>" * CONTEXT)) == CONTEXT
    monkeypatch.setattr(made, "_encoder", None)
    for encode in (made.encode_prompt, made.encode_rendered):
        with pytest.raises(Refusal) as caught:
            encode("x" * (24 * CONTEXT))
        assert caught.value.code == "context_length_exceeded"
        assert f"at least {2 * CONTEXT}" in caught.value.message


def test_ids_travel_as_little_endian_words() -> None:
    assert pack_ids([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert unpack_ids(pack_ids([5, 6])) == [5, 6]


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(msgspec.json.encode({"no": "tokenizer"}))
    with pytest.raises(ValueError, match=r"tokenizer\.json") as caught:
        TextEncoder(config.port_args.tokenizer_file, config.model_info)
    assert "\n" not in str(caught.value)
