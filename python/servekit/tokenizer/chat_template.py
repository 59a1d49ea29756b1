"""Chat templates: the model's Jinja text, compiled once, in a sandbox that can change nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from servekit.tokenizer.refusal import Refusal

PART_SEPARATOR = "\n"
"""Between the text parts of one message."""


class ChatTemplateError(ValueError):
    """A template that can't be compiled; the text says why, in one line."""


class _GenerationTag(Extension):
    """`{% generation %}`, with which training marks the assistant's part; here it means its content."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One model's template.

    Args:
        source: Jinja text.
        bos_token, eos_token: what the template prints for them.

    Raises:
        ChatTemplateError: the text is no template.
    """

    def __init__(self, source: str, bos_token: str | None = None, eos_token: str | None = None) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from None
        # Jinja chains two mappings of globals, and each rendering would walk through both in Python.
        self._template.globals = dict(self._template.globals)
        self._knows_developer = "developer" in source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Text of a conversation.

        Args:
            messages: role, content (string, list of text parts, or None), and what else the API gives a message.
            tools: function tools as the API spells them.
            add_generation_prompt: end with what starts the assistant's turn.
            continue_final_message: end inside the last message, for the model to go on with.
            kwargs: further variables of the template; they can't replace its own.

        Raises:
            Refusal: the template refuses the messages, or stumbles over them.
        """
        prepared = [self._prepare(message) for message in messages]
        variables = {
            **(kwargs or {}),
            **self._tokens,
            "messages": prepared,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self._template.render(variables)
        except jinja2.TemplateError as error:
            raise Refusal(400, f"the chat template refused the messages: {_line(error)}", param="messages") from None
        except RecursionError:
            raise Refusal(400, "the messages are nested too deeply", param="messages") from None
        except Exception as error:  # noqa: BLE001
            # A template is the model's own program: whatever it stumbles over came with the messages.
            raise Refusal(
                400, f"the chat template can't take these messages: {_line(error)}", param="messages"
            ) from None
        return _cut_after(text, prepared[-1]["content"]) if continue_final_message else text

    def _prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        prepared = {key: value for key, value in message.items() if value is not None}
        content = message.get("content")
        # Nearly all templates add content to text, and fail on null and on lists.
        prepared["content"] = (
            content if isinstance(content, str) else PART_SEPARATOR.join(part["text"] for part in content or ())
        )
        if prepared["role"] == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        if calls := prepared.get("tool_calls"):
            prepared["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return prepared


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments as an object, as templates print them; text that is no JSON object stays text."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _cut_after(text: str, content: str) -> str:
    # Templates may strip a message's content.
    for wanted in (content, content.strip()):
        at = text.rfind(wanted)
        if wanted and at >= 0:
            return text[: at + len(wanted)]
    raise Refusal(400, "continue_final_message needs a last message that the chat template shows", param="messages")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
