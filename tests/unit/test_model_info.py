"""What a Hugging Face folder's files say about a model is read right, and files that are wrong end in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from servekit.config.model_info import (
    ModelError,
    end_of_turn_ids,
    read_default_sampling,
    read_json,
    read_tokenizer_info,
    read_weights_info,
)

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 2}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ADDED = [
    {"id": 0, "content": "<unk>", "special": True},
    {"id": 1, "content": "<s>", "special": True},
    {"id": 2, "content": "</s>", "special": True},
    {"id": 7, "content": "<|im_end|>", "special": True},
    {"id": 8, "content": "<|eot_id|>", "special": False},
]
BOS_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def write(folder: Path, **files: Any) -> Path:
    """Writes `config` to config.json and so on."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


def tokenizer(post_processor: Any = None) -> dict[str, Any]:
    return {"added_tokens": ADDED, "post_processor": post_processor, "model": {"type": "BPE", "vocab": {"a": 3}}}


def test_end_ids_are_the_union_of_all_that_name_one(tmp_path: Path) -> None:
    write(
        tmp_path,
        config=CONFIG,
        generation_config={"eos_token_id": [3, 4]},
        tokenizer=tokenizer(),
        tokenizer_config={"eos_token": "<|eot_id|>"},
    )
    assert read_weights_info(tmp_path).end_ids == {2, 3, 4}
    # <|im_end|> is special and ends a turn; <|eot_id|> is not special, but the configuration names it.
    assert read_tokenizer_info(tmp_path).end_ids == {7, 8}


def test_end_of_turn_needs_a_special_token_and_knows_messages_within_an_answer() -> None:
    assert end_of_turn_ids({"<|end|>": 5, "<s>": 1}) == {5}
    assert end_of_turn_ids({"<|end|>": 5, "<|return|>": 6, "<|call|>": 7}) == {6, 7}
    assert end_of_turn_ids({}) == frozenset()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ("LlamaForCausalLM", 64, 100)),
        ({"architectures": None, "model_type": "llama"}, ("llama", 64, 100)),
        ({"architectures": [], "model_type": None}, ("unknown", 64, 100)),
        ({"max_position_embeddings": None, "n_positions": 32}, ("LlamaForCausalLM", 32, 100)),
        (
            {"vocab_size": None, "max_position_embeddings": None}
            | {"text_config": {"vocab_size": 9, "max_position_embeddings": 7}},
            ("LlamaForCausalLM", 7, 9),
        ),
        ({"rope_scaling": YARN}, ("LlamaForCausalLM", 128, 100)),
        ({"rope_parameters": YARN | {"rope_type": "yarn"}}, ("LlamaForCausalLM", 128, 100)),
        ({"rope_scaling": YARN, "max_position_embeddings": 200}, ("LlamaForCausalLM", 200, 100)),
        ({"rope_scaling": YARN | {"type": "linear"}}, ("LlamaForCausalLM", 64, 100)),
        ({"rope_scaling": {"type": "yarn"}}, ("LlamaForCausalLM", 64, 100)),
    ],
)
def test_weights_info(tmp_path: Path, change: dict[str, Any], expected: tuple[str, int, int]) -> None:
    config = {key: value for key, value in (CONFIG | change).items() if value is not None or key == "model_type"}
    info = read_weights_info(write(tmp_path, config=config))
    assert (info.architecture, info.max_model_len, info.vocab_size) == expected


def test_the_tokenizer_tells_the_length_where_the_model_does_not(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "max_position_embeddings"}
    write(tmp_path, config=config, tokenizer_config={"model_max_length": 77})
    assert read_weights_info(tmp_path).max_model_len == 77
    write(tmp_path, tokenizer_config={"model_max_length": 10**30})
    with pytest.raises(ModelError, match="max_position_embeddings"):
        read_weights_info(tmp_path)


@pytest.mark.parametrize(
    ("post_processor", "add_bos_token", "expected"),
    [
        (BOS_TEMPLATE, True, False),
        (BOS_TEMPLATE, None, False),
        ({"type": "Sequence", "processors": [BYTE_LEVEL, BOS_TEMPLATE]}, True, False),
        ({"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]}, True, False),
        (BYTE_LEVEL, True, True),
        (None, True, True),
        (None, False, False),
        (None, None, False),
    ],
)
def test_bos_is_added_once(tmp_path: Path, post_processor: Any, add_bos_token: bool | None, expected: bool) -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "add_bos_token": add_bos_token}
    info = read_tokenizer_info(write(tmp_path, tokenizer=tokenizer(post_processor), tokenizer_config=config))
    assert (info.bos_token, info.bos_id, info.add_bos) == ("<s>", 1, expected)


def test_without_a_bos_token_none_is_added(tmp_path: Path) -> None:
    config = {"bos_token": None, "add_bos_token": True}
    info = read_tokenizer_info(write(tmp_path, tokenizer=tokenizer(), tokenizer_config=config))
    assert (info.bos_token, info.bos_id, info.add_bos) == (None, None, False)


def test_special_tokens_map_is_the_second_place_to_look(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=tokenizer(), special_tokens_map={"eos_token": "</s>", "bos_token": "x"})
    write(tmp_path, tokenizer_config={"bos_token": "<s>"})
    info = read_tokenizer_info(tmp_path)
    assert (info.bos_token, info.eos_token) == ("<s>", "</s>")


def test_chat_template_places_in_order(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=tokenizer())
    assert read_tokenizer_info(tmp_path).chat_template is None
    write(tmp_path, tokenizer_config={"chat_template": [{"name": "rag", "template": "r"}]})
    assert read_tokenizer_info(tmp_path).chat_template == "r"
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}, {"bad": 1}]
    write(tmp_path, tokenizer_config={"chat_template": named})
    assert read_tokenizer_info(tmp_path).chat_template == "d"
    write(tmp_path, tokenizer_config={"chat_template": "config"})
    assert read_tokenizer_info(tmp_path).chat_template == "config"
    write(tmp_path, chat_template={"chat_template": "json"})
    assert read_tokenizer_info(tmp_path).chat_template == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert read_tokenizer_info(tmp_path).chat_template == "jinja"


def test_a_text_of_an_embedding_model_is_as_long_as_it_was_trained_on(tmp_path: Path) -> None:
    write(tmp_path, config=CONFIG, sentence_bert_config={"max_seq_length": 77})
    assert read_weights_info(tmp_path).max_model_len == 77


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "do_sample": False}, {}),
        ({"temperature": 0.6, "do_sample": False, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repetition_penalty": 0, "top_k": 5}, {"top_k": 5}),
        ({"top_k": 0, "min_p": 0}, {"top_k": -1, "min_p": 0}),
        ({"top_k": 20, "max_length": 50, "temperature": None}, {"top_k": 20}),
        ({"top_k": 1.5, "top_p": 0, "temperature": "hot", "min_p": True}, {}),
    ],
)
def test_default_sampling(generation: dict[str, Any], expected: dict[str, float]) -> None:
    assert read_default_sampling(generation) == expected


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no config.json"),
        ({"config": "{"}, "config.json: not JSON"),
        ({"config": "[1]"}, "config.json: not a JSON object"),
        ({"config": "[" * 100_000}, "config.json: not JSON"),
        ({"config": {"max_position_embeddings": 5}}, "no vocab_size"),
        ({"config": CONFIG | {"vocab_size": True}}, "no vocab_size"),
        ({"config": CONFIG, "generation_config": "nonsense"}, "generation_config.json: not JSON"),
    ],
)
def test_weights_errors_are_one_line(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_weights_info(write(tmp_path, **files))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer": "{}}"}, "not a tokenizer.json"),
        ({"tokenizer": {"added_tokens": [{"id": "x", "content": 1}]}}, "not a tokenizer.json"),
        ({"tokenizer": tokenizer(), "tokenizer_config": "!"}, "tokenizer_config.json: not JSON"),
    ],
)
def test_tokenizer_errors_are_one_line(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_tokenizer_info(write(tmp_path, **files))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="directory"):
        read_json(tmp_path / "config.json")
