"""Chat templates render what models were trained on, and nothing that came with a request can change them."""

from __future__ import annotations

from typing import Any

import pytest
from servekit.tokenizer.chat_template import ChatTemplate, ChatTemplateError
from servekit.tokenizer.refusal import Refusal

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
LOOP = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def test_blocks_take_their_line_ends_along() -> None:
    source = (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    )
    assert ChatTemplate(source).render(HI) == "U: hi\n"


def test_special_tokens_and_prompt() -> None:
    source = "{{ bos_token }}" + LOOP + "{{ eos_token }}{% if add_generation_prompt %}>{% endif %}"
    template = ChatTemplate(source, "<s>", None)
    assert template.render(HI) == "<s>[user:hi]>"
    assert template.render(HI, add_generation_prompt=False) == "<s>[user:hi]"


@pytest.mark.parametrize(
    ("content", "text"),
    [("a", "a"), (None, ""), ([], ""), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb")],
)
def test_content_is_always_text(content: object, text: str) -> None:
    source = "{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "assistant", "content": content}]) == f"<{text}>"


def test_developers_are_systems_where_the_template_knows_none() -> None:
    message = [{"role": "developer", "content": "x"}]
    assert ChatTemplate(LOOP).render(message) == "[system:x]"
    assert ChatTemplate(LOOP + "{# developer #}").render(message) == "[developer:x]"


def test_calls_come_with_their_arguments_as_objects() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source)

    def rendered(arguments: str) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return template.render([{"role": "assistant", "content": None, "tool_calls": [call]}])

    assert rendered('{"a": "é<"}') == '{"a": "é<"}'
    assert rendered("not json") == '"not json"'
    assert rendered("[1]") == '"[1]"'


def test_tools_reach_the_template() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    source = "{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}"
    assert '"name": "f"' in ChatTemplate(source).render(HI, [tool])
    assert ChatTemplate(source).render(HI, []) == ""


def test_continuing_the_last_message_ends_inside_it() -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}")
    messages = [*HI, {"role": "assistant", "content": " So "}]
    assert template.render(messages, continue_final_message=True) == "<user>hi</><assistant>So"
    with pytest.raises(Refusal):
        template.render([*HI, {"role": "assistant", "content": ""}], continue_final_message=True)


def test_variables_of_the_request_replace_none_of_ours() -> None:
    template = ChatTemplate(LOOP + "{{ thinking }}{{ bos_token }}", "<s>")
    kwargs = {"thinking": "on", "bos_token": "evil", "messages": []}
    assert template.render(HI, kwargs=kwargs) == "[user:hi]on<s>"


def test_what_templates_in_the_wild_use() -> None:
    source = (
        "{% generation %}a{% endgeneration %}{% for i in range(3) %}{% if i == 1 %}{% break %}"
        "{% endif %}{{ i }}{% endfor %}"
        "{% set ns = namespace(x=1) %}"
        "{% set ns.x = 2 %}{{ ns.x }}{{ strftime_now('%Y') | length }}{{ {'a': 'é'} | tojson }}"
    )
    assert ChatTemplate(source).render(HI) == 'a024{"a": "é"}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ missing.attribute }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_what_fails_in_a_template_is_a_refusal(source: str) -> None:
    with pytest.raises(Refusal) as caught:
        ChatTemplate(source).render(HI)
    assert caught.value.status == 400
    assert "\n" not in caught.value.message


def test_deep_values_are_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(Refusal):
        ChatTemplate("{{ tools | tojson }}").render(HI, [deep])


@pytest.mark.parametrize("arguments", ["[" * 100_000, "{", "1" * 5000], ids=lambda text: text[:5])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    template = ChatTemplate("{% for m in messages %}{{ m.tool_calls[0].function.arguments }}{% endfor %}")
    assert template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == arguments


def test_a_template_that_is_none_fails_at_the_start() -> None:
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("\n{% for %}")
