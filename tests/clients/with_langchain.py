"""langchain-openai, which sends explicit nulls. Arguments as for `with_openai.py`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

url, model, embedding_url, embedding_model, key = sys.argv[1:]
there: Any = {"base_url": f"{url}/v1", "api_key": key, "max_retries": 0, "timeout": 120}
chat_model = ChatOpenAI(model=model, temperature=0, max_tokens=12, stream_usage=True, **there)
question = "What is the capital of France?"


def chat() -> None:
    answer = chat_model.invoke(question)
    assert "Paris" in answer.content, answer
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] <= 12
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    whole: Any = None
    for chunk in chat_model.stream(question):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == answer.content
    assert whole.usage_metadata == answer.usage_metadata
    chain = ChatPromptTemplate.from_messages([("system", "You know {what}."), ("user", "{question}")]) | chat_model
    answers = chain.batch([{"what": what, "question": question} for what in ("towns", "rivers")])
    assert all(each.content for each in answers)
    with_logprobs = chat_model.bind(logprobs=True, top_logprobs=2).invoke(question)
    assert with_logprobs.response_metadata["logprobs"]["content"]


def history() -> None:
    call: Any = {"name": "add", "args": {"a": 1, "b": 2}, "id": "c1"}
    messages = [
        SystemMessage("Be short."),
        HumanMessage([{"type": "text", "text": "1 + 2?"}]),
        AIMessage("", tool_calls=[call]),
        ToolMessage("3", tool_call_id="c1"),
        HumanMessage("So?"),
    ]

    def add(a: int, b: int) -> int:
        """Sum of two numbers."""
        return a + b

    assert isinstance(chat_model.bind_tools([add]).invoke(messages), AIMessage)


def text() -> None:
    completions = OpenAI(model=model, temperature=0, max_tokens=12, **there)
    prompt = "The capital of France is"
    assert "".join(completions.stream(prompt)) == completions.invoke(prompt)


def embeddings() -> None:
    vectors = OpenAIEmbeddings(
        model=embedding_model, base_url=f"{embedding_url}/v1", api_key=key, check_embedding_ctx_length=False
    )
    assert [len(each) for each in vectors.embed_documents(["a", "b"])] == [384, 384]
    assert len(vectors.embed_query("a")) == 384


def errors() -> None:
    try:
        chat_model.invoke("word " * 20_000)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
        # A subclass of langchain's own, by which agents know that they have to forget something.
        assert type(error) is not openai.BadRequestError, type(error)
    else:
        raise AssertionError("a prompt beyond the context was taken")


async def chat_async() -> None:
    pieces = [chunk.content async for chunk in chat_model.astream(question)]
    assert "Paris" in "".join(map(str, pieces))


for step in (chat, history, text, embeddings, errors):
    step()
    print(step.__name__, "ok", flush=True)
asyncio.run(chat_async())
print("chat_async ok")
