"""Calls with a tag for each argument: what may be generated of them, and that what is read of that fits the schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from bough.errors import InvalidRequest
from bough.protocol.generation import Function, ToolChoice, Tools
from orchestrator.tools.call_parser import ArgumentsText
from orchestrator.tools.formats import FORMATS
from orchestrator.tools.tagged_call import argument_types
from tests.fakes.tool_models import model_of
from tests.fakes.tool_templates import written

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "short": {"type": "string", "minLength": 2, "maxLength": 4, "description": "two to four characters"},
        "path": {"type": "string", "pattern": "^/[a-z/]+$"},
        "tail": {"type": "string", "pattern": "z$"},
        "unit": {"enum": ["K", "C", 5]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tree": {"$ref": "#/$defs/Tree"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "flag": {"allOf": [{"$ref": "#/$defs/Flag"}]},
        "any": {},
    },
    "required": ["code", "other"],  # the latter has no schema
    "$defs": {"Tree": {"type": "object", "properties": {"up": {"$ref": "#/$defs/Tree"}}}, "Flag": {"type": "boolean"}},
}
TAGGED = ["qwen3_coder", "seed_oss", "glm45", "glm47"]
RIGHT: list[dict[str, Any]] = [
    {"code": "", "other": 1},
    {"code": 'if a < 1:\n    "x"</p\n', "other": "text é"},
    {"code": "x", "short": "éé", "path": "/a/b", "tail": "a\nz", "unit": "K", "size": 7, "other": None},
    {"code": "x", "unit": 5, "tree": {"up": {}}, "note": "5", "flag": False, "any": [1, "a"], "other": {}},
    {"code": "null", "note": None, "any": "a", "other": "True"},
]
WRONG: list[dict[str, Any]] = [
    {},
    {"code": "x"},
    {"code": "x", "short": "a", "other": 1},
    {"code": "x", "short": "abcde", "other": 1},
    {"code": "x", "path": "a/b", "other": 1},
    {"code": "x", "path": "/a/B", "other": 1},
    {"code": "x", "tail": "az.", "other": 1},
    {"code": "x", "unit": "F", "other": 1},
    {"code": "x", "unit": 6, "other": 1},
    {"code": "x", "size": 100, "other": 1},
    {"code": "x", "size": "many", "other": 1},
    {"code": "x", "tree": {"up": 1}, "other": 1},
    {"code": "x", "flag": "true?", "other": 1},
    {"other": 1, "code": "order"},
]


def arguments_read(name: str, text: str, tools: Tools) -> Any:
    (known,) = (one for one in FORMATS if one.name == name)
    pieces = known.parser(tools).push(text)
    return json.loads("".join(piece.text for piece in pieces if isinstance(piece, ArgumentsText)))


@pytest.mark.parametrize("name", TAGGED)
async def test_arguments_follow_their_schema_and_keep_their_types(name: str) -> None:
    tools = Tools((Function("f", json.dumps(SCHEMA)),), ToolChoice.REQUIRED)
    model = model_of(name)
    grammar, _ = await model.form(tools)
    for meant in RIGHT:
        text = written(name, json.dumps({"name": "f", "arguments": meant}))
        assert model.allows(grammar, text), meant
        jsonschema.validate(arguments := arguments_read(name, text, tools), SCHEMA)
        assert arguments == meant
    for meant in WRONG:
        assert not model.allows(grammar, written(name, json.dumps({"name": "f", "arguments": meant}))), meant


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "anyOf"),
        ({"minProperties": 1}, "minProperties"),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {"minLength": 1}]}}}, "allOf"),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 9}}}, "anyOf"),
        ({"properties": {"a": {"type": "strin"}}}, ""),
        ({"properties": {"a": {"enum": []}}}, "enum"),
    ],
)
async def test_schemas_that_tags_cannot_express_are_refused_by_name(schema: dict[str, Any], field: str) -> None:
    """Only where it must be followed: otherwise the model's own calls are read as far as types are known."""
    function = Function("f", json.dumps({"type": "object"} | schema))
    with pytest.raises(InvalidRequest, match=rf"^chat\.tools\[0\]\.function\.parameters: must .*{field}"):
        await model_of("qwen3_coder").form(Tools((function,), ToolChoice.REQUIRED))
    assert await model_of("qwen3_coder").form(Tools((function,))) == ("", {})
    assert argument_types(json.loads(function.parameters), "a") in (None, {"strin"})


@pytest.mark.parametrize(
    ("properties", "what"),
    [
        ({"a": {"enum": ["a", "x</parameter>"]}}, "enum with </parameter>"),
        ({"a": {"const": "</parameter>"}}, "enum with </parameter>"),
        ({"a": {"type": ["string", "null"], "enum": ["</parameter>", None]}}, "enum with </parameter>"),
        ({"a>b": {"type": "string"}}, "> in a property's name"),
        ({" a": {"type": "string"}}, "> in a property's name"),
    ],
)
async def test_a_schema_whose_texts_could_not_be_read_back_is_refused(properties: dict[str, Any], what: str) -> None:
    function = Function("f", json.dumps({"type": "object", "properties": properties}))
    with pytest.raises(InvalidRequest, match=rf"^chat\.tools\[0\]\.function\.parameters: must have no {what}"):
        await model_of("qwen3_coder").form(Tools((function,), ToolChoice.REQUIRED))
    if "a" in properties:
        await model_of("glm47").form(Tools((function,), ToolChoice.REQUIRED))  # its tags are others


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    [
        "^a|b$", "a|^b", "(^a|b)c", "x(a$|b)", "^(a|b)$", "^^a$$", "\\^a\\$", "[$^]", "a|^$", "^a$|^bc$", "^(?:a|bc$)",
        "[^^]$", "a/b", "[/]a", r"\\/", "[]^a]b", "b", "",
    ],
)  # fmt: skip
async def test_anchors_of_a_pattern_mark_the_ends_of_the_text(pattern: str) -> None:
    """Those within were taken for nothing, so that texts were drawn that do not match."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    model = model_of("glm47")
    grammar, _ = await model.form(Tools((Function("f", json.dumps(schema)),), ToolChoice.REQUIRED))
    for text in ("", "a", "b", "ab", "ba", "bc", "ac", "xa", "xb", "xay", "^a$", "$", "a/b", "/a", "\\/", "x\na", "]b"):
        called = written("glm47", json.dumps({"name": "f", "arguments": {"a": text}}))
        is_right = jsonschema.Draft202012Validator(schema).is_valid({"a": text})
        assert model.allows(grammar, called) == is_right, text


def test_types_are_found_anywhere_in_a_schema() -> None:
    assert {key: argument_types(SCHEMA, key) for key in (*SCHEMA["properties"], "unknown")} == {
        "code": {"string"},
        "short": {"string"},
        "path": {"string"},
        "tail": {"string"},
        "unit": {"string", "number"},
        "size": {"number"},
        "tree": {"object"},
        "note": {"string", "null"},
        "flag": {"boolean"},
        "any": None,
        "unknown": None,
    }
    odds: list[Any] = [[], 3, {"a": [1]}, {"a": {"$ref": 3, "enum": 3, "type": [3]}}, {"a": {"$ref": "#/properties/a"}}]
    assert {argument_types({"properties": odd}, "a") for odd in odds} == {None}


def test_a_schema_with_many_forbidden_values_takes_no_time() -> None:
    """References multiply: 300 in each of three lists were 27 million empty enums, read on the event loop."""
    lists = {f"L{level}": {"anyOf": [{"$ref": f"#/$defs/L{level + 1}"}] * 300} for level in range(3)}
    schema = {"properties": {"a": {"$ref": "#/$defs/L0"}}, "$defs": lists | {"L3": {"enum": []}}}
    assert argument_types(schema, "a") is None
