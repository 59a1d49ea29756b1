"""The demo model through every process: the tokens of the reference, however many processes share the work.

`tests/data/smollm2_greedy.jsonl` holds greedy tokens on which transformers, llama.cpp and a minimal torch model agree.
Lines whose `min_gap` (distance of the two best logits) is above 0.1 hold for any arithmetic, the others for float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.conftest import Server

LINES = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data" / "smollm2_greedy.jsonl").read_text().splitlines()
]
STRICT = [line for line in LINES if line["min_gap"] > 0.1]
MODEL = "x"


def ask(server: Server, prompt: Any, **fields: Any) -> dict[str, Any]:
    """One completion of up to 32 tokens: ids, text, usage and how it ended."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 32, "temperature": 0, "return_token_ids": True, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=100)
    assert answer.status_code == 200, answer.text
    choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    # How much of a prompt was cached depends on who came before, and where.
    usage.pop("prompt_tokens_details", None)
    return {
        "ids": choice["token_ids"],
        "text": choice["text"],
        "finish": choice["finish_reason"],
        "usage": usage,
    }


def ask_all(server: Server, requests: list[tuple[Any, dict[str, Any]]], at_once: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda request: ask(server, request[0], **request[1]), requests))


def check(server: Server, lines: list[dict[str, Any]]) -> None:
    got = ask_all(server, [(line["prompt_ids"], {}) for line in lines], 8)
    for line, answer in zip(lines, got, strict=True):
        assert answer["ids"] == line["greedy"], line["prompt"]
        assert answer["text"] == line["text"], line["prompt"]
        assert answer["usage"]["prompt_tokens"] == len(line["prompt_ids"])
        assert answer["usage"]["completion_tokens"] == len(line["greedy"])
        assert answer["finish"] == ("length" if len(line["greedy"]) == 32 else "stop")


def test_the_official_client_gets_the_reference_in_the_default_setting(start: Callable[..., Server]) -> None:
    server = start(engine="torch")
    check(server, STRICT)

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for line in STRICT:
        whole = client.completions.create(model=MODEL, prompt=line["prompt"], max_tokens=32, temperature=0)
        assert whole.choices[0].text == line["text"]
    pieces = client.completions.create(
        model=MODEL, prompt=STRICT[0]["prompt"], max_tokens=32, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in pieces) == STRICT[0]["text"]

    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of Germany?"}],
        "temperature": 0,
    }
    answer = client.chat.completions.create(**chat)
    assert answer.choices[0].message.content == "The capital of Germany is Berlin."
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "The capital of Germany is Berlin."
    assert chunks[-1].usage == answer.usage


@pytest.mark.slow
def test_two_of_everything_give_the_tokens_of_one(start: Callable[..., Server]) -> None:
    greedy: list[tuple[Any, dict[str, Any]]] = [(line["prompt_ids"], {}) for line in LINES]
    seeded = [(line["prompt_ids"], {"temperature": 0.8, "top_p": 0.9, "seed": i}) for i, line in enumerate(LINES)]

    single = start("--dtype", "float32", engine="torch")
    check(single, LINES)
    want = ask_all(single, greedy + seeded, 4)
    single.stop()

    server = start(
        "--dtype", "float32", "--tokenizer-workers", "2", "--detokenizer-workers", "2", "--dp", "2", engine="torch"
    )
    check(server, LINES)
    assert ask_all(server, greedy + seeded, 64) == want

    with ThreadPoolExecutor(64) as pool:
        streams = list(pool.map(lambda request: stream(server, *request), (greedy + seeded) * 2))
    assert streams == [answer["text"] for answer in want] * 2

    page = server.state()["state_page"]
    assert all(worker["requests"] > 0 for worker in page["workers"]), page["workers"]
    assert all(rank["dispatched"] > 0 for rank in page["ranks"]), page["ranks"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--tp 3", "--pp 2", "--pp 2 --dp 2", "--tp 3 --dp 3 --enable-dp-attention"])
def test_a_group_gives_the_tokens_of_one_process(start: Callable[..., Server], layout: str) -> None:
    server = start("--dtype", "float32", *layout.split(), engine="torch")
    check(server, LINES)


@pytest.mark.slow
def test_a_group_that_the_heads_do_not_fill_is_told_which_one_does(start: Callable[..., Server]) -> None:
    server = start("--tp", "2", engine="torch", wait=False)
    assert server.process.wait(60) == 1
    assert "whose 9 attention heads are split 2 ways: it can be 1 or 3" in server.text()


def stream(server: Server, prompt: Any, fields: dict[str, Any]) -> str:
    """The text of a streamed completion."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 32, "temperature": 0, **fields, "stream": True}
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=100) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                text += json.loads(line[6:])["choices"][0]["text"]
    assert line == "data: [DONE]" or not line
    return text
