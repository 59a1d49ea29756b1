"""Raw prompts in request bodies: texts, ids, and lists of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servekit.config.model_info import ModelInfo
from servekit.tokenizer.encoding import TextEncoder
from servekit.tokenizer.options import TOKEN_ID_SCHEMA, token_limit
from servekit.tokenizer.refusal import Refusal

Prompts = str | list[str | int | list[int]]
"""A text, a list of texts, ids, or a list of lists of ids."""
_IDS = {"type": "array", "items": TOKEN_ID_SCHEMA, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
TEXTS_SCHEMA = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}
IDS_SCHEMA = {"anyOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1}]}
PROMPTS_SCHEMA = {"anyOf": [*TEXTS_SCHEMA["anyOf"], *IDS_SCHEMA["anyOf"]]}
"""The JSON schema of `Prompts`, which the type can't tell: they can't be mixed."""


def prompts_of(prompt: Prompts | None, model: ModelInfo, param: str) -> list[str | list[int]]:
    """The prompts, each a text or its ids.

    Raises:
        Refusal: there is none, they are of different kinds, ids do not fit the context, or one is outside the
            vocabulary.
    """
    if prompt is None:
        raise Refusal(400, f"{param} is missing", param=param)
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if not kinds:
        raise Refusal(400, f"{param} must not be an empty list", param=param)
    if len(kinds) > 1:
        raise Refusal(400, f"{param}: texts, ids and lists of ids can't be mixed", param=param)
    prompts: list[Any] = [prompt] if kinds == {int} else prompt
    for each in prompts:
        if isinstance(each, list):
            # Before anything that takes time for each of millions of ids.
            token_limit(None, len(each), model.max_model_len)
            check_ids(each, model.vocab_size, param)
    return prompts


def check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Token ids from a client.

    Raises:
        Refusal: there are none, or one is outside the vocabulary.
    """
    if not ids:
        raise Refusal(400, f"{param} must not be empty", param=param)
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise Refusal(400, f"{param}: token ids must be from 0 to {vocab_size - 1}", param=param)


def encode_prompts(
    encoder: TextEncoder, prompts: Sequence[str | list[int]], add_special_tokens: bool
) -> list[list[int]]:
    """Ids of prompts in either form.

    Raises:
        Refusal: a text is longer than any that fits the context.
    """
    made = iter(encoder.encode_prompts([each for each in prompts if isinstance(each, str)], add_special_tokens))
    return [next(made) if isinstance(each, str) else each for each in prompts]
