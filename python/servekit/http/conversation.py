"""Conversations in request bodies: messages, tools, and how the template renders them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from servekit.tokenizer.chat_template import ChatTemplate
from servekit.tokenizer.refusal import Refusal


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only text is served."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "refusal"]})]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made earlier in the conversation."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct, kw_only=True):
    """One turn. Only an assistant's content may be missing or null."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`parameters` is a JSON schema of an object."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


_PARTS_SCHEMA = {
    "type": "array",
    "items": {
        "anyOf": [
            {"required": ["text"], "properties": {"type": {"const": "text"}, "text": {"type": "string"}}},
            {
                "required": ["refusal"],
                "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}, "text": {"type": "null"}},
            },
        ]
    },
}
MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "allOf": [
            {"$ref": "#/components/schemas/Message"},
            {"properties": {"content": {"anyOf": [{"type": ["string", "null"]}, _PARTS_SCHEMA]}}},
            {
                "anyOf": [
                    {"properties": {"role": {"const": "assistant"}}},
                    {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
                ]
            },
        ]
    },
}
"""The JSON schema of messages, with what their type can't tell: only an assistant's content may be missing, parts need
their text."""


class Conversation(Protocol):
    """Fields of every body that brings messages.

    Attributes:
        add_generation_prompt: end with the start of the assistant's turn; true by default.
        continue_final_message: let the model go on inside the last message.
        chat_template_kwargs: further variables for the template.
    """

    messages: list[Message] | None
    tools: list[Tool] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def size_of(body: Conversation) -> int:
    """Characters in the messages, about."""
    size = 0
    for message in body.messages or ():
        content = message.content
        size += len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content or ())
    return size


def render(body: Conversation, template: ChatTemplate) -> str:
    """Text of the conversation for the model.

    Raises:
        Refusal: the template refuses it.
    """
    return template.render(
        msgspec.to_builtins(body.messages),
        msgspec.to_builtins(body.tools),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        kwargs=body.chat_template_kwargs,
    )


def check_conversation(body: Conversation, template: ChatTemplate | None) -> ChatTemplate:
    """Check what the types of a conversation can't say; returns the template, which there has to be.

    Raises:
        Refusal: no messages, a part that is not text, a message without content, or a model without a template.
    """
    if not body.messages:
        raise Refusal(
            400, "messages must not be empty" if body.messages == [] else "messages is missing", param="messages"
        )
    for i, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            raise Refusal(400, f"messages[{i}].content is missing", param=f"messages[{i}].content")
        if isinstance(message.content, list):
            for k, part in enumerate(message.content):
                _check_part(part, f"messages[{i}].content[{k}]")
    if body.continue_final_message and body.add_generation_prompt:
        raise Refusal(
            400, "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if template is None:
        raise Refusal(
            400,
            "this model has no chat template: use /v1/completions, or start the server with --chat-template",
            param="messages",
        )
    return template


def _check_part(part: ContentPart, where: str) -> None:
    if part.type == "refusal" and part.text is None:
        part.text = part.refusal
    elif part.type != "text":
        raise Refusal(
            400,
            f"{where}: parts of type {part.type[:40]!r} are not supported, only text",
            param=where,
            code="unsupported_parameter",
        )
    if part.text is None:
        raise Refusal(400, f"{where}.text is missing", param=f"{where}.text")
