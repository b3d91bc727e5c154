"""Which fields of a request body must occur together, for the document at /openapi.json.

JSON Schema cannot say that two values are related: that `tool_choice` names one of `tools`, `min_tokens` is at most
`max_tokens`, or a text is a grammar. Nor does the document know the served models: how many tokens and nodes they have.
"""

from __future__ import annotations

from typing import Any

from orchestrator.http_api.fields.generation import FORMS
from orchestrator.http_api.responses.fields import LOGPROBS

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}


def _given(**fields: Schema) -> Schema:
    """Objects that have these fields, and not null."""
    properties = {name: {"allOf": [schema, {"not": NULL}]} for name, schema in fields.items()}
    return {"properties": properties, "required": [*fields]}


def _if_given(**fields: Schema) -> Schema:
    """Objects whose fields are so, null, or left out."""
    return {"properties": {name: {"anyOf": [schema, NULL]} for name, schema in fields.items()}}


def _left_out(*names: str) -> Schema:
    """Objects without these fields, or with null."""
    return {"properties": dict.fromkeys(names, NULL)}


def _any(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas]}


def _all(*schemas: Schema) -> Schema:
    return {"allOf": [*schemas]}


_ANY: Schema = {}
_EMPTY, _ZERO, _ONE, _FALSE, _TRUE = ({"const": value} for value in ("", 0, 1, False, True))
_TEXT: Schema = {"type": "string"}

_FORM_NAMES = (*FORMS, "structured_outputs")
_NO_FORM = _left_out(*_FORM_NAMES)
_ONE_FORM = _any(*(_left_out(*(each for each in _FORM_NAMES if each != name)) for name in _FORM_NAMES))
_FREE = _if_given(type={"const": "text"})
_FREE_ANSWER = _if_given(response_format=_FREE)
_FREE_RESPONSE = _if_given(text=_if_given(format=_FREE))

_NO_TOOLS = _if_given(tools={"maxItems": 0})
_NO_CHOICE = _if_given(tool_choice={"enum": ["none", "auto"]})
_LOOSE = _if_given(strict=_FALSE)
_LOOSE_TOOL = _all(_LOOSE, _if_given(function=_LOOSE))  # with its fields, or its function's
_FREE_CALLS = _any(
    _NO_TOOLS,
    _given(tool_choice={"const": "none"}),
    _all(_NO_CHOICE, _if_given(parallel_tool_calls=_TRUE, tools={"items": _LOOSE_TOOL})),
)
_TOOLS_TO_CHOOSE = _any(_NO_CHOICE, _given(tools={"minItems": 1}))

_ONE_PROMPT: Schema = {"properties": {"prompt": _any(_TEXT, {"maxItems": 1}, {"items": {"type": "integer"}})}}
_ONE_CHOICE = _if_given(n=_ONE)
_NO_SESSION = _if_given(session_id=_EMPTY)
_MORE_THAN_REASONING = {"contains": {"not": _given(type={"const": "reasoning"})}}


def _forms(free: Schema) -> list[Schema]:
    """One field at most says what the answer must be; what a grammar leads to its end cannot go on beyond it."""
    is_open = _all(_NO_FORM, free, _FREE_CALLS)
    return [_ONE_FORM, _any(_NO_FORM, free), _any(is_open, _if_given(ignore_eos=_FALSE, min_tokens=_ZERO))]


def _schema_of_its_type(name: str) -> Schema:
    """A format has a schema in this field if its type is json_schema, and otherwise none."""
    return _any(
        _all(_given(type={"const": "json_schema"}), _given(**{name: _ANY})),
        _all(_given(type={"enum": ["text", "json_object"]}), _left_out(name)),
    )


RULES: dict[str, list[Schema]] = {
    "ChatFields": [
        *_forms(_FREE_ANSWER),
        _TOOLS_TO_CHOOSE,
        _if_given(max_tokens={"minimum": 1}),
        _any(_left_out("max_tokens"), _left_out("max_completion_tokens")),  # or equal, which cannot be said
        _any(_if_given(top_logprobs=_ZERO), _given(logprobs=_TRUE)),
        _any(_NO_SESSION, _ONE_CHOICE),
    ],
    "CompletionFields": [
        *_forms(_FREE_ANSWER),
        _any(_if_given(max_tokens={"minimum": 1}), _given(echo=_TRUE, logprobs=_ANY)),
        _any(_ONE_PROMPT, _ONE_CHOICE),  # or a product within the limit of `n`, which cannot be said
        _any(_NO_SESSION, _all(_ONE_PROMPT, _ONE_CHOICE)),
    ],
    "ResponseFields": [
        *_forms(_FREE_RESPONSE),
        _TOOLS_TO_CHOOSE,
        _any(_if_given(top_logprobs=_ZERO), _given(include={"contains": {"const": LOGPROBS}})),
        _any(_given(input=_any(_TEXT, _MORE_THAN_REASONING)), _given(instructions=_ANY)),
    ],
    "TokenizeFields": [
        _any(
            _all(_given(messages=_ANY), _left_out("prompt"), _if_given(add_special_tokens=_FALSE)),
            _all(
                _given(prompt=_ANY),
                _left_out("messages"),
                _NO_TOOLS,
                _if_given(add_special_tokens=_TRUE, chat_template_kwargs={"maxProperties": 0}),
            ),
        )
    ],
    "ResponseFormatFields": [_schema_of_its_type("json_schema")],
    "TextFormatFields": [_schema_of_its_type("schema")],
    "StructuredOutputsFields": [
        {
            "oneOf": [_given(**{name: _ANY}) for name in ("json", "regex", "choice", "grammar")]
            + [_given(json_object=_TRUE)]
        }
    ],
}
