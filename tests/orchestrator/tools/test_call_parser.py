"""Calls are found however the text is divided, and nothing else of it is lost."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.protocol.generation import Function, Tools
from orchestrator.tools.call_object import ObjectSyntax
from orchestrator.tools.call_parser import ArgumentsText, CallBegun, ContentText
from orchestrator.tools.formats import FORMATS, MISTRAL_NAMED
from orchestrator.tools.tagged_call import TaggedSyntax

KNOWN = {"mistral_named" if known is MISTRAL_NAMED else known.name: known for known in FORMATS}
SCHEMA = (
    '{"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, '
    '"b": {"anyOf": [{"$ref": "#/$defs/B"}, {"type": "null"}]}, "e": {"enum": ["x", 5]}, "u": {}, '
    '"t": {"type": ["string", "null"], "description": "a text"}}, "$defs": {"B": {"const": true}}}'
)
TOOLS = Tools((Function("f", SCHEMA), Function("get_time", '{"type": "object", "properties": 3}')))


class Read(NamedTuple):
    """The joined pieces of a parser."""

    content: str
    calls: list[tuple[str, str]]
    is_cut: bool  # in a call


def read(format_name: str, pieces: list[str]) -> Read:
    parser = KNOWN[format_name].parser(TOOLS)
    content, calls = "", list[tuple[str, str]]()
    told = [piece for text in pieces for piece in parser.push(text)] + parser.finish()
    for piece in told:
        match piece:
            case ContentText(text):
                content += text
            case CallBegun(name):
                calls.append((name, ""))
            case ArgumentsText(text):
                calls[-1] = calls[-1][0], calls[-1][1] + text
    return Read(content, calls, parser.is_in_call)


F = '{"name": "f", "arguments": {"a": [1, "}\\"]"]}}'
T = '{"arguments": {}, "name": "get_time"}'
P = '{"name": "f", "parameters": {"a": 1}}'
A = '{"a": [1, "}\\"]"]}'
BOTH = [("f", A), ("get_time", "{}")]

NOW = "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
QWEN_VALUES = {"s": 'a\n b "<', "n": "12", "o": '{"a": 1}', "b": "True", "e": "5", "u": "[1]", "v": "NaN", "t": "5"}
QWEN_TAGS = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in QWEN_VALUES.items())
QWEN = f"<tool_call>\n<function=f>\n{QWEN_TAGS}</function>\n</tool_call>"
TYPED = '{"s": "a\\n b \\"<", "n": 12, "o": {"a": 1}, "b": true, "e": 5, "u": [1], "v": "NaN", "t": "5"}'

CODER = "<tool_call><function=f>"
SEED = "<seed:tool_call><function=f><parameter=s>\na\n</parameter></function></seed:tool_call>"
GLM = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>"

TEXTS = [
    ("hermes", "Hello <b> there\n", Read("Hello <b> there\n", [], False)),
    ("hermes", f"<tool_call>\n{F}\n</tool_call>", Read("", [("f", A)], False)),
    ("hermes", f"I see.\n<tool_call>\n{F}\n</tool_call>", Read("I see.", [("f", A)], False)),
    ("hermes", f"<tool_call>{F}</tool_call>\n<tool_call>\n{T}</tool_call>\n", Read("", BOTH, False)),
    ("hermes", f"<tool_call>{F}</tool_call> Done. ", Read(" Done.", [("f", A)], False)),
    ("hermes", "a <tool_call> is <tool_call", Read("a <tool_call> is <tool_call", [], False)),
    ("hermes", '<tool_call>{"name": 3}', Read('<tool_call>{"name": 3}', [], False)),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', Read('<tool_call>{"arguments": {}}</tool_call>', [], False)),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', Read("", [("f", "{}")], False)),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', Read("", [("f", '{"a": "x')], True)),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', Read("", [("f", '{"a": 1}')], False)),
    ("hermes", '<tool_call>{"name": "f", "arguments": null , "id": 1.5}', Read("", [("f", "null")], False)),
    ("hermes", '<tool_call>{"name": "f" is it', Read("is it", [("f", "")], True)),
    ("hermes", '<tool_call>{"name": "f", "arguments": } so', Read("} so", [("f", "")], True)),
    ("hermes", '<tool_call>{"name": "f" x<tool_call>{"bad": } a', Read('x<tool_call>{"bad": } a', [("f", "")], True)),
    ("hermes", f'<tool_call>{{"name": "f" x<tool_call>{F}', Read("x", [("f", ""), ("f", A)], False)),
    ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": 1, "arguments": 2}', Read("", [("f", "1")], False)),
    ("llama3_json", f'{{"name": "A", <|python_tag|>{P}', Read('{"name": "A",', [("f", '{"a": 1}')], False)),
    ("llama3_json", P, Read("", [("f", '{"a": 1}')], False)),
    ("llama3_json", f"\n {P}; {P}", Read("", [("f", '{"a": 1}')] * 2, False)),
    ("llama3_json", f"<|python_tag|>{P}", Read("", [("f", '{"a": 1}')], False)),
    ("llama3_json", f"Calling <|python_tag|> {P}\n", Read("Calling", [("f", '{"a": 1}')], False)),
    ("llama3_json", '{"name": "Ann", "parameters": {}}', Read('{"name": "Ann", "parameters": {}}', [], False)),
    ("llama3_json", '{"city": "Rome"} is it', Read('{"city": "Rome"} is it', [], False)),
    ("llama3_json", f"See {P}", Read(f"See {P}", [], False)),
    ("llama3_json", "", Read("", [], False)),
    ("mistral", f"[TOOL_CALLS][{F}]", Read("", [("f", A)], False)),
    ("mistral", f"Well, [TOOL_CALLS] [{F}, {T}]", Read("Well,", BOTH, False)),
    ("mistral", f"[TOOL_CALLS]{F}", Read("", [("f", A)], False)),
    ("mistral", "[TOOL_CALLS][1]", Read("[TOOL_CALLS][1]", [], False)),
    ("mistral", "[TOOL_CALLS", Read("[TOOL_CALLS", [], False)),
    ("mistral_named", f"So [TOOL_CALLS]f[ARGS]{A}[TOOL_CALLS]get_time[ARGS] {{}}", Read("So", BOTH, False)),
    ("mistral_named", "[TOOL_CALLS]f[ARG S]{}", Read("[TOOL_CALLS]f[ARG S]{}", [], False)),
    ("mistral_named", "[TOOL_CALLS]f[ARGS]1", Read("[TOOL_CALLS]f[ARGS]1", [], False)),
    ("mistral_named", '[TOOL_CALLS]f[ARGS]{"a": ', Read("", [("f", '{"a": ')], True)),
    ("mistral_named", "[TOOL_CALLS]f", Read("[TOOL_CALLS]f", [], False)),
    ("qwen3_coder", f"Hm.\n{QWEN}", Read("Hm.", [("f", TYPED)], False)),
    ("qwen3_coder", QWEN.replace("\n", ""), Read("", [("f", TYPED.replace("a\\n b ", "a b "))], False)),
    ("qwen3_coder", f"{NOW}\n{NOW} Done.", Read(" Done.", [("get_time", "{}")] * 2, False)),
    ("qwen3_coder", QWEN[:70], Read("", [("f", '{"s": "a\\n b \\"<"')], True)),
    ("qwen3_coder", "<tool_call>\n<function=f>x", Read("<tool_call>\n<function=f>x", [], False)),
    ("qwen3_coder", "<tool_call>\n<function", Read("<tool_call>\n<function", [], False)),
    ("qwen3_coder", f"<tool_call>{F}</tool_call>", Read(f"<tool_call>{F}</tool_call>", [], False)),
    ("qwen3_coder", f"<tool_call><function= >{NOW}", Read("<tool_call><function= >", [("get_time", "{}")], False)),
    ("qwen3_coder", f"{CODER}<parameter=s>\n</parameter></function> x", Read(" x", [("f", '{"s": ""}')], False)),
    ("qwen3_coder", f"{CODER}<parameter=n>\n4\n</parameter> x", Read(" x", [("f", '{"n": 4')], True)),
    ("seed_oss", SEED, Read("", [("f", '{"s": "\\na\\n"}')], False)),
    ("glm45", f"Yes\n{GLM}", Read("Yes", [("f", '{"s": "1"}'), ("get_time", "{}")], False)),
    ("glm45", "<tool_call>and so", Read("<tool_call>and so", [], False)),
    ("glm47", GLM.replace("\n", ""), Read("", [("f", '{"s": "1"}'), ("get_time", "{}")], False)),
    ("glm47", "<tool_call>f</tool_cal", Read("<tool_call>f</tool_cal", [], False)),
]  # fmt: skip


@pytest.mark.parametrize(("format_name", "text", "expected"), TEXTS)
def test_calls_are_found_however_the_text_is_divided(format_name: str, text: str, expected: Read) -> None:
    assert read(format_name, [text]) == expected
    assert read(format_name, list(text)) == expected
    for size in (2, 3, 7):
        assert read(format_name, [text[i : i + size] for i in range(0, len(text), size)]) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=4), JSON, max_size=3)


@given(st.sampled_from([*KNOWN][:4]), OBJECTS, st.booleans(), st.lists(st.integers(0, 200), max_size=4))
def test_arguments_are_returned_as_written(
    format_name: str, arguments: dict[str, object], is_ascii: bool, cuts: list[int]
) -> None:
    known = KNOWN[format_name]
    written = json.dumps(arguments, ensure_ascii=is_ascii, indent=2 if len(cuts) == 3 else None)
    spelling = known.spelling
    call = f"f[ARGS]{written}"
    if isinstance(known.syntax, ObjectSyntax):
        call = f'{{"name": "f", "{known.syntax.arguments_key}": {written}}}'
    text = f"{spelling.mark}{spelling.opening}{call}{spelling.end}"
    ends = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert read(format_name, [text[a:b] for a, b in pairwise(ends)]) == Read("", [("f", written)], False)


VALUES = st.dictionaries(st.sampled_from("sno"), st.text(max_size=9).filter(lambda text: "</" not in text), max_size=3)


@given(st.sampled_from([*KNOWN][4:8]), VALUES, st.lists(st.integers(0, 200), max_size=4))
def test_texts_between_tags_are_returned_as_written(name: str, texts: dict[str, str], cuts: list[int]) -> None:
    known = KNOWN[name]
    tags = known.syntax
    assert isinstance(tags, TaggedSyntax)
    values = {key: text if key == "s" else json.dumps([text]) for key, text in texts.items()}
    written = "".join(f"{tags.before_key}{k}{tags.after_key}{v}{tags.after_value}" for k, v in values.items())
    text = f"{known.spelling.mark}{tags.before_name}f{tags.after_name}{written}{tags.end}{known.spelling.end}"
    ends = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    content, [(_, arguments)], is_cut = read(name, [text[a:b] for a, b in pairwise(ends)])
    assert (content, is_cut) == ("", False)
    assert json.loads(arguments) == {key: value if key == "s" else json.loads(value) for key, value in values.items()}


FRAGMENTS = [
    *{known.spelling.mark for known in FORMATS}, *{known.spelling.end for known in FORMATS},
    *{text for known in FORMATS for text in known.syntax.texts}, "f", "s", "n", "f[ARGS]{", "<parameter=s>", "</par",
    '{"name": "f"', '{"name": "g"', '"name": "f"', ', "arguments": ', ', "parameters": ', "{}", '{"a": "}"}', F, T, P,
    "{", "}", "[", "]", ",", ";", ":", '"', "\\", " ", "\n", "x", "<tool_", "call>",
]  # fmt: skip


@given(st.sampled_from([*KNOWN]), st.lists(st.sampled_from(FRAGMENTS), max_size=12))
def test_parsing_does_not_depend_on_how_the_text_is_divided(format_name: str, pieces: list[str]) -> None:
    whole = read(format_name, ["".join(pieces)])
    assert read(format_name, pieces) == whole
    assert read(format_name, list("".join(pieces))) == whole


def test_a_name_nested_too_deeply_is_text() -> None:
    """Python's reader of JSON calls itself for each bracket: its RecursionError ended the request."""
    text = '<tool_call>{"name": ' + "[" * 9000 + "]" * 9000 + "}</tool_call>"
    assert read("hermes", [text]) == Read(text, [], False)
