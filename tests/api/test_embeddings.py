"""`/v1/embeddings` against a scripted control process."""

from __future__ import annotations

import base64
import struct
from typing import Any

import httpx
import openai
import pytest
from servekit.messages.batches import BatchEmbeddingOutput, FinishReason, Tensor
from servekit.messages.envelope import Envelope, Kind
from servekit.messages.requests import TokenizedEmbeddingReqInput
from servekit.tokenizer.encoding import unpack_ids

from tests.api.fakes import FakeControl, FakeServer


def embed(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/v1/embeddings", json={"model": "tiny", "input": "hello", **body})


def test_the_answer_has_openais_shape(server: FakeServer, http: httpx.Client) -> None:
    answer = embed(http).json()
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [5.0, 0.5, 0.0, 0.0]}],
        "model": "tiny",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    ((envelope, body),) = server.control.embedded
    assert (body.rid, envelope.tokens, envelope.rank) == (envelope.id, 5, -1)
    assert len(unpack_ids(body.input_ids)) == 5
    assert server.page.requests == 0


@pytest.mark.parametrize(
    ("given", "lengths"), [(["a", "abc"], [1, 3]), ([1, 2, 3], [3]), ([[1], [2, 3]], [1, 2]), ("a" * 1000, [1000])]
)
def test_inputs_in_every_form(http: httpx.Client, given: object, lengths: list[int]) -> None:
    answer = embed(http, input=given).json()
    assert [(each["index"], each["embedding"][0]) for each in answer["data"]] == list(enumerate(map(float, lengths)))
    assert answer["usage"]["prompt_tokens"] == sum(lengths)


def test_base64_is_little_endian_float32(server: FakeServer, http: httpx.Client) -> None:
    text = embed(http, encoding_format="base64", dimensions=2).json()["data"][0]["embedding"]
    assert struct.unpack("<2f", base64.b64decode(text)) == (5.0, 0.5)
    assert server.control.embedded[0][1].dimensions == 2
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=["hello", "hi"])
        assert [each.embedding[0] for each in answer.data] == [5.0, 2.0]


def test_a_stacked_array_is_read_too(server: FakeServer, http: httpx.Client) -> None:
    def script(control: FakeControl, envelope: Envelope, body: TokenizedEmbeddingReqInput) -> None:
        if len(control.embedded) == 2:
            rids = [each.id for each, _ in control.embedded]
            ends = [FinishReason("stop")] * 2
            vectors = Tensor("f32", [2, 3], struct.pack("<6f", *range(6)))
            control.send(
                Envelope(Kind.BATCH_EMBEDDING, rows=2, rank=0),
                BatchEmbeddingOutput(rids, finished_reasons=ends, embeddings=vectors),
                rids[0],
            )

    server.control.embed = script
    data = embed(http, input=["a", "b"]).json()["data"]
    assert [each["embedding"] for each in data] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    "reason", [FinishReason("error", message="no embeddings here", status=400), FinishReason("stop")]
)
def test_a_rank_that_has_no_vector(server: FakeServer, http: httpx.Client, reason: FinishReason) -> None:
    def script(control: FakeControl, envelope: Envelope, body: TokenizedEmbeddingReqInput) -> None:
        batch = BatchEmbeddingOutput([envelope.id], finished_reasons=[reason], embeddings=[b""])
        control.send(Envelope(Kind.BATCH_EMBEDDING, rows=1, rank=0), batch, envelope.id)

    server.control.embed = script
    response = embed(http)
    assert response.status_code == (400 if reason.type == "error" else 500)
    assert response.json()["error"]["message"]
    assert server.page.requests == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("input", None), ("input", []), ("input", [[]]), ("input", 5), ("input", {"a": 1}), ("input", ["a", 1]),
     ("input", [-1]), ("input", [10**6]), ("input", ""), ("input", ["a", ""]), ("encoding_format", "int3"),
     ("dimensions", 0), ("dimensions", "x"), ("data_parallel_rank", 3), ("input", ["a"] * 2049), ("model", None)],
)  # fmt: skip
def test_what_is_refused_names_its_field(server: FakeServer, http: httpx.Client, field: str, value: object) -> None:
    response = embed(http, **{field: value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(field)
    assert server.control.embedded == []
    assert server.page.requests == 0


def test_an_input_beyond_the_context_says_how_long_it_is(http: httpx.Client) -> None:
    response = embed(http, input="a" * 1001)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "1001" in response.json()["error"]["message"]


def test_a_rank_can_be_named(own_server: Any) -> None:
    server = own_server({"data_parallel_size": 2})
    body = {"model": "tiny", "input": "a"}
    assert (
        httpx.post(server.url + "/v1/embeddings", json=body, headers={"X-Data-Parallel-Rank": "1"}).status_code == 200
    )
    assert server.control.embedded[0][0].rank == 1
    assert server.control.embedded[0][1].data_parallel_rank == 1
