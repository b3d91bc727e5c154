"""Variables that a request sets in its chat template: bounded, never the server's own, and part of what is rendered."""

from __future__ import annotations

import json

import pytest

from bough.errors import InvalidRequest
from bough.tokenization.chat_template import (
    MAX_DEPTH,
    MAX_LENGTH,
    MAX_NUMBER,
    RESERVED,
    ChatTemplate,
    template_variables,
)

# As families have them, in few words.
QWEN = (
    "{% for m in messages %}{% if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}\n{% endfor %}assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ messages[0].content }}"
    "{{ '<think>' if thinking else '</think>' }}"
)
EFFORT = "{{ messages[0].content }} ({{ reasoning_effort | default('medium') }})"
HELLO = [("user", "Hello")]
REJECTED = "these messages, or what chat_template_kwargs says"


def rendered(source: str, **variables: object) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(HELLO, template_variables(json.dumps(variables)))


def test_a_template_reads_a_requests_variables() -> None:
    assert rendered(QWEN).endswith("assistant\n")
    assert rendered(QWEN, enable_thinking=True) == rendered(QWEN) == rendered(QWEN, unknown=[1, {"a": None}])
    assert rendered(QWEN, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    assert rendered(DEEPSEEK) == "Hello</think>"
    assert rendered(DEEPSEEK, thinking=True) == "Hello<think>"
    turn = ChatTemplate(QWEN, "", "").render_turn(HELLO, template_variables('{"enable_thinking": false}'))
    assert turn == "\nHello\nassistant\n<think>\n\n</think>\n\n"


def test_an_effort_is_a_variable_and_sets_switches_that_are_not_given() -> None:
    assert rendered(EFFORT, reasoning_effort="high") == "Hello (high)"
    assert rendered(QWEN, reasoning_effort="none") == rendered(QWEN, enable_thinking=False)
    assert rendered(DEEPSEEK, reasoning_effort="low") == "Hello<think>"
    assert rendered(DEEPSEEK, reasoning_effort="none") == "Hello</think>"
    assert rendered(DEEPSEEK, reasoning_effort="high", thinking=False) == "Hello</think>"


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("text", "must"),
    [
        *((json.dumps({name: 1}), f"got '{name}'") for name in sorted(RESERVED)),
        ('{"__class__": 1}', "names of variables that the server does not set, got '__class__'"),
        ('{"a b": 1}', "got 'a b'"),
        ('{"": 1}', "got ''"),
        (json.dumps({"a": nested(MAX_DEPTH + 1)}), "8 lists and objects deep, got more in 'a'"),
        (json.dumps({"a": [MAX_NUMBER + 1]}), "numbers of -10000000 to 10000000, got one in 'a'"),
        ('{"a": NaN}', "got one in 'a'"),
        ('{"a": 1e999}', "got one in 'a'"),
        ('{"a": "' + "x" * MAX_LENGTH + '"}', f"at most {MAX_LENGTH} characters"),
        ("[1]", r"a JSON object, got '\[1\]'"),
        ("{", "a JSON object, got '{'"),
        ("[" * 10_000, "a JSON object"),
    ],
)
def test_reserved_variables_are_refused(text: str, must: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^chat\.chat_template_kwargs: must .*{must}"):
        template_variables(text)


def test_limits_are_inclusive() -> None:
    given = {"a": nested(MAX_DEPTH), "b": -MAX_NUMBER, "c": "x", "d": None, "e": {"f": 0.5}}
    assert template_variables(json.dumps(given)) == given
    assert template_variables("") == template_variables("{}") == {}


@pytest.mark.parametrize(
    "source",
    [
        "{{ value.__class__ }}", "{{ value.__init__.__globals__ }}", "{{ value.append(1) }}{{ value.x.y }}",
        "{{ value | attr('__class__') | first }}", "{{ 1 / value }}", "{{ value + 1 }}", "{{ value() }}",
        "{{ [1][value] }}", "{{ '%d' % value }}", "{{ '{0.__class__}'.format(value) }}", "{{ {}[value] }}",
        "{{ value.items() }}", "{{ range(value) | length }}", "{{ value | int | batch(0) | list }}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", ["x", "{0.__class__.__mro__}", [], {}, 0, 10**7, None, True])
def test_a_value_of_the_wrong_type_is_refused_or_rendered_without_access_to_python(source: str, value: object) -> None:
    try:
        text = rendered(source, value=value)
    except InvalidRequest as exc:
        text = str(exc).removeprefix(f"chat: the model's chat template rejects {REJECTED}: ")
    assert "<class" not in text
    assert "<function" not in text
