"""OpenAI's own client, its streaming helpers included. Arguments: URL, model, embedding URL, embedding model, key."""

from __future__ import annotations

import asyncio
import math
import sys
from typing import Any

import openai

url, model, embedding_url, embedding_model, key = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
question: Any = [{"role": "user", "content": "What is the capital of France?"}]
fixed: Any = {"model": model, "temperature": 0, "max_tokens": 12}


def refused(error: type[openai.APIStatusError], ask: Any, *args: Any, **options: Any) -> openai.APIStatusError:
    """The exception that a request ends with."""
    try:
        ask(*args, **options)
    except error as raised:
        return raised
    raise AssertionError(f"{options} were taken")


def models() -> None:
    card = client.models.list().data[0]
    assert card.id == model
    assert client.models.retrieve(model).id == model


def chat() -> None:
    answer = client.chat.completions.create(messages=question, **fixed)
    text = answer.choices[0].message.content
    assert text and "Paris" in text, text
    assert answer.usage and answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.choices[0].finish_reason in ("stop", "length")

    streamed, usage = "", None
    for chunk in client.chat.completions.create(
        messages=question, stream=True, stream_options={"include_usage": True}, **fixed
    ):
        if chunk.choices:
            streamed += chunk.choices[0].delta.content or ""
        else:
            usage = chunk.usage
    assert streamed == text
    assert usage and usage.completion_tokens == answer.usage.completion_tokens

    raw = client.chat.completions.with_raw_response.create(messages=question, **fixed)
    assert raw.status_code == 200 and raw.parse().choices[0].message.content == text
    with client.chat.completions.with_streaming_response.create(messages=question, **fixed) as response:
        assert text in response.read().decode()


def streaming_helper() -> None:
    """`stream` builds the whole answer from the chunks and tells events on the way."""
    whole = client.chat.completions.create(messages=question, logprobs=True, top_logprobs=2, n=2, **fixed)
    kinds: dict[str, int] = {}
    with client.chat.completions.stream(
        messages=question, logprobs=True, top_logprobs=2, n=2, stream_options={"include_usage": True}, **fixed
    ) as stream:
        for event in stream:
            kinds[event.type] = kinds.get(event.type, 0) + 1
        built = stream.get_final_completion()
    assert kinds["content.done"] == kinds["logprobs.content.done"] == 2, kinds
    assert kinds["content.delta"] > 2 and kinds["logprobs.content.delta"] > 2, kinds
    assert built.usage and whole.usage and built.usage.total_tokens == whole.usage.total_tokens
    for ours, theirs in zip(built.choices, whole.choices, strict=True):
        assert ours.message.content == theirs.message.content
        assert ours.finish_reason == theirs.finish_reason
        assert ours.logprobs and theirs.logprobs and ours.logprobs.content and theirs.logprobs.content
        assert [each.token for each in ours.logprobs.content] == [each.token for each in theirs.logprobs.content]

    with client.chat.completions.stream(messages=question, model=model, max_tokens=500) as stream:
        next(iter(stream))
    # The context manager closed the connection in the middle: the server goes on to answer others.
    chat()


def history() -> None:
    """A conversation in which a tool was called: nothing is parsed, everything is taken."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages: Any = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "user", "content": "So?"},
    ]
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    answer = client.chat.completions.create(messages=messages, tools=[tool], tool_choice="auto", **fixed)
    assert answer.choices[0].message.content is not None
    refused(
        openai.BadRequestError, client.chat.completions.create, messages=messages, tools=[tool],
        tool_choice="required", **fixed,
    )  # fmt: skip


def completions() -> None:
    answer = client.completions.create(prompt="The capital of France is", **fixed)
    chunks = client.completions.create(prompt="The capital of France is", stream=True, **fixed)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    many = client.completions.create(prompt=[[504, 3575, 282], [504, 1343]], logprobs=1, echo=True, **fixed)
    assert [choice.index for choice in many.choices] == [0, 1]
    logprobs = many.choices[1].logprobs
    assert logprobs and logprobs.token_logprobs and logprobs.tokens
    assert logprobs.token_logprobs[0] is None and logprobs.token_logprobs[1] is not None
    assert "".join(logprobs.tokens) == many.choices[1].text


def embeddings() -> None:
    """Without `encoding_format` the client asks for base64 and decodes it."""
    vectors = openai.OpenAI(base_url=f"{embedding_url}/v1", api_key=key, max_retries=0)
    texts = ["a cat sits here", "a kitten is sitting here", "interest rates rose"]
    decoded = [each.embedding for each in vectors.embeddings.create(model=embedding_model, input=texts).data]
    plain = vectors.embeddings.create(model=embedding_model, input=texts, encoding_format="float").data
    assert all(
        math.isclose(a, b, abs_tol=1e-6)
        for left, right in zip(decoded, plain, strict=True)
        for a, b in zip(left, right.embedding, strict=True)
    )
    near, far = (sum(a * b for a, b in zip(decoded[0], other, strict=True)) for other in decoded[1:])
    assert near > far
    refused(openai.BadRequestError, client.embeddings.create, model=model, input="x")


def errors() -> None:
    create = client.chat.completions.create
    gone = refused(openai.NotFoundError, create, messages=question, model="other")
    assert gone.code == "model_not_found"
    wrong = refused(openai.BadRequestError, create, messages=question, model=model, temperature=-1)
    assert wrong.param == "temperature"
    long: Any = [{"role": "user", "content": "word " * 20_000}]
    too_long = refused(openai.BadRequestError, create, messages=long, model=model)
    assert too_long.code == "context_length_exceeded"
    refused(openai.BadRequestError, create, messages=question, model=model, response_format={"type": "json_object"})
    refused(openai.NotFoundError, client.responses.create, model=model, input="x")
    stranger = client.with_options(api_key="wrong")
    refused(openai.AuthenticationError, stranger.models.list)


async def at_once() -> None:
    """Streams beside each other, one of them left in the middle."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120) as many:

        async def ask(number: int) -> str:
            stream = await many.chat.completions.create(
                messages=[{"role": "user", "content": f"Count to {number}."}], stream=True, **fixed
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if number == 3 and text:
                    await stream.close()
                    break
            return text

        texts = await asyncio.gather(*map(ask, range(2, 10)))
        assert all(texts), texts


for step in (models, chat, streaming_helper, history, completions, embeddings, errors):
    step()
    print(step.__name__, "ok", flush=True)
asyncio.run(at_once())
print("at_once ok")
