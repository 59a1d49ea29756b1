"""litellm, under the names it has for servers that speak OpenAI's API. Arguments as for `with_openai.py`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import litellm

url, model, embedding_url, embedding_model, key = sys.argv[1:]
there: Any = {"api_base": f"{url}/v1", "api_key": key, "max_retries": 0, "timeout": 120}
question: Any = [{"role": "user", "content": "What is the capital of France?"}]
fixed: Any = {"temperature": 0, "max_tokens": 12}


def chat() -> None:
    for provider in ("openai", "hosted_vllm"):
        name = f"{provider}/{model}"
        answer: Any = litellm.completion(model=name, messages=question, **fixed, **there)
        text = answer.choices[0].message.content
        assert "Paris" in text, text
        chunks = list(
            litellm.completion(
                model=name, messages=question, stream=True, stream_options={"include_usage": True}, **fixed, **there
            )
        )
        built: Any = litellm.stream_chunk_builder(chunks, messages=question)
        assert built.choices[0].message.content == text
        assert built.usage.total_tokens == answer.usage.total_tokens


async def chat_async() -> None:
    stream: Any = await litellm.acompletion(
        model=f"openai/{model}", messages=question, stream=True, logprobs=True, top_logprobs=2, **fixed, **there
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert "Paris" in text, text


def text() -> None:
    name = f"text-completion-openai/{model}"
    for prompt in ("The capital of France is", [504, 3575, 282]):
        answer: Any = litellm.text_completion(model=name, prompt=prompt, **fixed, **there)
        chunks = litellm.text_completion(model=name, prompt=prompt, stream=True, **fixed, **there)
        assert "".join(chunk.choices[0].text or "" for chunk in chunks) == answer.choices[0].text


def embeddings() -> None:
    answer: Any = litellm.embedding(
        model=f"openai/{embedding_model}",
        input=["a", "b"],
        api_base=f"{embedding_url}/v1",
        api_key=key,
        encoding_format="float",
    )
    assert [len(each["embedding"]) for each in answer.data] == [384, 384]
    assert answer.usage.prompt_tokens > 0


def errors() -> None:
    """litellm tells errors apart by status and by words in the message."""
    long = [{"role": "user", "content": "word " * 20_000}]
    for error, options in [
        (litellm.NotFoundError, {"model": "openai/other", "messages": question}),
        (litellm.ContextWindowExceededError, {"model": f"openai/{model}", "messages": long}),
        (litellm.BadRequestError, {"model": f"openai/{model}", "messages": question, "temperature": -1}),
        (litellm.AuthenticationError, {"model": f"openai/{model}", "messages": question, "api_key": "wrong"}),
    ]:
        try:
            litellm.completion(**{**there, **options})
        except error:
            continue
        raise AssertionError(f"no {error.__name__}")


for step in (chat, text, embeddings, errors):
    step()
    print(step.__name__, "ok", flush=True)
asyncio.run(chat_async())
print("chat_async ok")
