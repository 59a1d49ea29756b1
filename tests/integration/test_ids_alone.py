"""A server without a tokenizer: ids in, ids out, text refused with a line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx

from tests.integration.conftest import Server

IDS = [1, 504, 3575, 282]


def test_ids_go_in_and_out_without_a_tokenizer(start: Callable[..., Server]) -> None:
    server = start("--skip-tokenizer-init", "--served-model-name", "x", "--detokenizer-workers", "2")
    asked = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    whole = httpx.post(f"{server.url}/generate", json=asked, timeout=30).json()
    assert whole["text"] == ""
    assert len(whole["output_ids"]) == 5
    assert whole["meta_info"]["completion_tokens"] == 5
    with httpx.stream("POST", f"{server.url}/generate", json={**asked, "stream": True}, timeout=30) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["output_ids"] == whole["output_ids"]

    body = {"model": "x", "prompt": IDS, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    choice = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", whole["output_ids"])

    for path, wrong in [
        ("/v1/completions", {**body, "prompt": "text"}),
        ("/v1/completions", {**body, "stop": "x"}),
        ("/v1/completions", {**body, "echo": True}),
        ("/v1/chat/completions", {"model": "x", "messages": [{"role": "user", "content": "hi"}]}),
    ]:
        refused = httpx.post(f"{server.url}{path}", json=wrong, timeout=30)
        assert refused.status_code == 400, refused.text
        assert "without a tokenizer" in refused.json()["error"]["message"]
    assert server.state()["control"]["in_flight"] == 0
