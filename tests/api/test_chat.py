"""`/v1/chat/completions` against a scripted control process."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from servekit.tokenizer.encoding import unpack_ids

from tests.api.fakes import FakeServer, events, says

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def chat(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, **body})


def prompt_of(server: FakeServer, http: httpx.Client) -> str:
    """Text of the last prompt that reached the control process."""
    ids = unpack_ids(server.control.generated[-1][1].input_ids)
    text: str = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    return text


def test_the_answer_has_openais_shape(http: httpx.Client) -> None:
    answer = chat(http).json()
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello world!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None


def test_without_a_limit_it_runs_to_the_end_of_the_context(server: FakeServer, http: httpx.Client) -> None:
    chat(http)
    envelope, body = server.control.generated[0]
    assert body.sampling_params.max_new_tokens == 1000 - envelope.tokens


def test_the_newer_limit_goes_first(server: FakeServer, http: httpx.Client) -> None:
    chat(http, max_tokens=50, max_completion_tokens=2)
    assert server.control.generated[0][1].sampling_params.max_new_tokens == 2


def test_the_template_makes_the_prompt(server: FakeServer, http: httpx.Client) -> None:
    chat(http)
    assert prompt_of(server, http) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("message", "rendered"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "user\na\nb"),
        ({"role": "assistant", "content": None}, "assistant\n"),
        ({"role": "assistant"}, "assistant\n"),
        ({"role": "developer", "content": "x", "name": "n", "unknown": 1}, "system\nx"),
        ({"role": "tool", "content": "42", "tool_call_id": "c"}, "tool\n42"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "assistant\nno"),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            "assistant\n",
        ),
    ],
)
def test_messages_of_every_form(server: FakeServer, http: httpx.Client, message: object, rendered: str) -> None:
    assert chat(http, messages=[message, *HI]).status_code == 200
    assert prompt_of(server, http).startswith(f"<|im_start|>{rendered}<|im_end|>\n<|im_start|>user")


def test_the_prompt_can_be_open(server: FakeServer, http: httpx.Client) -> None:
    chat(http, add_generation_prompt=False)
    assert prompt_of(server, http).endswith("hi<|im_end|>\n")
    chat(http, messages=[*HI, {"role": "assistant", "content": "so"}], continue_final_message=True)
    assert prompt_of(server, http).endswith("<|im_start|>assistant\nso")


def test_tools_are_taken(http: httpx.Client) -> None:
    for choice in (None, "auto", "none"):
        assert chat(http, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False).status_code == 200


def test_deltas(server: FakeServer, http: httpx.Client) -> None:
    server.control.script = says("Hello", " world", "!", pause=0.02)
    *chunks, done = events(chat(http, stream=True).content)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert not any("role" in delta for delta in deltas[1:])
    assert [delta["content"] for delta in deltas[1:-1]] == ["Hello", " world", "!"]
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello world!"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_each_of_n_choices_has_its_own_role_and_end(server: FakeServer, http: httpx.Client) -> None:
    server.control.script = says("Hello", " world", "!", pause=0.02)
    *chunks, _ = events(chat(http, stream=True, n=3).content)
    for index in range(3):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["delta"].get("role") for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]


@pytest.mark.parametrize("model", [{}, {"add_bos": True}])
@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0]['content'] }}", "{{ messages[0]['content'] }}"])
def test_the_first_token_never_comes_twice(own_server, model: dict[str, Any], template: str) -> None:
    server = own_server(model={**model, "chat_template": template})
    with httpx.Client(base_url=server.url) as http:
        chat(http)
        ids = unpack_ids(server.control.generated[-1][1].input_ids)
        assert ids.count(256) == (1 if "bos" in template or model else 0)
        assert 256 not in ids[1:]
        http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
        assert unpack_ids(server.control.generated[-1][1].input_ids).count(256) == (1 if model else 0)


def test_a_model_without_a_template_says_so(own_server) -> None:
    server = own_server(model={"chat_template": None})
    response = httpx.post(server.url + "/v1/chat/completions", json={"model": "tiny", "messages": HI})
    assert response.status_code == 400
    assert "template" in response.json()["error"]["message"]


def test_what_the_template_refuses_is_the_clients_fault(own_server) -> None:
    server = own_server(model={"chat_template": "{{ raise_exception('no ' + messages[0]['role']) }}"})
    response = httpx.post(server.url + "/v1/chat/completions", json={"model": "tiny", "messages": HI, "stream": True})
    assert response.status_code == 400
    assert "no user" in response.json()["error"]["message"]
    assert server.page.requests == 0


def test_the_official_client_reads_it(server: FakeServer) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(model="tiny", messages=HI)
        assert answer.choices[0].message.content == "Hello world!"
        stream = client.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello world!"
        assert last.choices == []
        assert last.usage.completion_tokens == 3
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=HI)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
        assert caught.value.param == "temperature"
