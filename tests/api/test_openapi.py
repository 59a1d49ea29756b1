"""The OpenAPI document tells the truth about bodies and answers."""

from __future__ import annotations

import re
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from servekit.http import answers

BASE = {"model": "tiny", "max_tokens": 2}
VOCABULARY = 259
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body", "type_"),
    [
        (
            "/v1/chat/completions",
            {**BASE, "messages": MESSAGES, "n": 2, "return_token_ids": True},
            answers.ChatCompletion,
        ),
        ("/v1/completions", {**BASE, "prompt": ["a", "b"]}, answers.Completion),
        ("/v1/embeddings", {"model": "tiny", "input": "a"}, answers.EmbeddingList),
        ("/v1/embeddings", {"model": "tiny", "input": "a", "encoding_format": "base64"}, answers.EmbeddingList),
        ("/generate", {"text": "a"}, answers.Generated),
        ("/tokenize", {"prompt": "a"}, answers.TokenList),
        ("/detokenize", {"tokens": [1]}, answers.DetokenizedText),
        ("/v1/models", None, answers.ModelList),
        ("/v1/models/tiny", None, answers.ModelCard),
    ],
)
def test_answers_are_what_it_says(http: httpx.Client, path: str, body: dict[str, Any] | None, type_: Any) -> None:
    """Nothing is missing, nothing is of another type, and nothing is there that the document does not know."""
    response = http.get(path) if body is None else http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert msgspec.to_builtins(msgspec.json.decode(response.content, type=type_)) == response.json()


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        (
            "/v1/chat/completions",
            [
                CHAT,
                {**CHAT, "stop": ["a"], "n": 2, "logit_bias": {"5": -1}, "tool_choice": "auto", "stream": False},
                {**CHAT, "messages": [{"role": "assistant", "content": None}, *CHAT["messages"]]},
                {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
                {**CHAT, "response_format": {"type": "text"}, "temperature": None},
            ],
            [
                {"messages": CHAT["messages"]},
                {**CHAT, "model": "other"},
                {**CHAT, "messages": []},
                {**CHAT, "messages": [{"role": "user"}]},
                {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                {**CHAT, "messages": [{"role": "assistant", "content": [{"type": "text"}]}]},
                {**CHAT, "messages": [{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}]},
                {**CHAT, "temperature": -1},
                {**CHAT, "logit_bias": {"x": 1}},
                {**CHAT, "tool_choice": "required"},
                {**CHAT, "response_format": {"type": "json_object"}},
            ],
        ),
        (
            "/v1/completions",
            [{**BASE, "prompt": each} for each in ("a", ["a", "b"], [1, 2], [[1], [2]])],
            [BASE, *({**BASE, "prompt": each} for each in ("", [], [[]], [1, "a"], [-1], [VOCABULARY]))],
        ),
        ("/v1/embeddings", [{"model": "tiny", "input": "a", "dimensions": 3}], [{"model": "tiny", "input": []}]),
        (
            "/generate",
            [{"text": "a"}, {"input_ids": [[1]], "text": None}],
            [{}, {"text": "a", "input_ids": [1]}, {"text": ["a", 1]}],
        ),
        (
            "/tokenize",
            [{"prompt": ""}, {"messages": CHAT["messages"], "prompt": None}],
            [{}, {"prompt": "a", "messages": []}],
        ),
        ("/detokenize", [{"tokens": []}], [{}, {"tokens": [-1]}, {"tokens": [VOCABULARY]}]),
    ],
)
def test_bodies_are_taken_as_it_says(
    http: httpx.Client, path: str, good: list[dict[str, Any]], bad: list[dict[str, Any]]
) -> None:
    document = http.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    check = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    for bodies, taken in ((good, True), (bad, False)):
        for body in bodies:
            assert check.is_valid(body) is taken, body
            assert (http.post(path, json=body).status_code == 200) is taken, body


def test_what_must_be_there_is_required(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, name, fields in (
        ("/v1/chat/completions", "ChatCompletionRequest", ["model", "messages"]),
        ("/v1/completions", "CompletionRequest", ["model", "prompt"]),
        ("/v1/embeddings", "EmbeddingRequest", ["model", "input"]),
    ):
        operation = document["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/" + name)
        assert schemas[name]["required"] == fields
        assert schemas[name]["properties"]["model"] == {"type": "string", "enum": ["tiny"]}
        (header,) = operation["parameters"]
        assert (header["name"], header["schema"]["maximum"]) == ("X-Data-Parallel-Rank", 0)
        assert schemas[name]["properties"]["data_parallel_rank"]["anyOf"][0]["maximum"] == 0
        assert http.post(path, json={}).status_code == 400
    prompts = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert {"type": "string", "minLength": 1} in prompts


def test_streams_are_told(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        content = paths[path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
        assert content["text/event-stream"]["itemSchema"]["required"] == ["data"]


def test_every_reference_leads_somewhere(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= known


def test_token_ids_are_those_of_the_vocabulary(http: httpx.Client) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    ids = {"type": "integer", "minimum": 0, "maximum": VOCABULARY - 1}
    assert fields["stop_token_ids"]["anyOf"][0]["items"] == ids
    assert {"type": "array", "items": ids, "minItems": 1} in fields["prompt"]["anyOf"]
    assert schemas["DetokenizeRequest"]["properties"]["tokens"]["items"] == ids
    pattern = fields["logit_bias"]["anyOf"][0]["propertyNames"]["pattern"]
    found = [number for number in range(3 * VOCABULARY) if re.search(pattern, str(number))]
    assert found == list(range(VOCABULARY))
    body = {"model": "tiny", "prompt": "hi", "logit_bias": {str(VOCABULARY - 1): 1}}
    assert http.post("/v1/completions", json=body).status_code == 200
