"""Fields about tools: what may be called, whether it is to be, and calls in earlier messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, StrictBool

from bough.config.json_fields import must
from bough.protocol.generation import Function, ToolCall, ToolChoice, Tools
from bough.protocol.sampling_params import MAX_GRAMMAR
from orchestrator.http_api.base_fields import Fields, Ignored
from orchestrator.http_api.errors import Json, invalid

MAX_TOOLS = 128  # as at OpenAI
MAX_TOOLS_CHARACTERS = MAX_GRAMMAR  # of all descriptions and schemas together
MAX_CALLS = 128  # in one message
FUNCTION_NAME = (
    r"^[A-Za-z0-9_.:/-]{1,128}$"  # all that needs no escapes in JSON and that servers of tools have as names
)
_FUNCTION = '{"type": "function", "function": {"name": ...}}'
NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'


def _parameters(value: Any) -> Any:
    """Accept the JSON Schema of an object, which need not say that it is one."""
    if not isinstance(value, dict):
        raise must("be a JSON Schema")
    schema = value if "type" in value else {"type": "object"} | value
    if schema["type"] != "object":
        raise must('be a JSON Schema of type "object"')
    return json.dumps(schema, ensure_ascii=False)


def arguments_text(value: Any) -> Any:
    """Accept the text of a JSON object; an empty text is as good as an empty object."""
    try:
        parsed = json.loads(value or "{}")
        json.dumps(parsed, ensure_ascii=False).encode()  # half of an escaped pair of surrogates is no text
    except (TypeError, ValueError, RecursionError):
        parsed = None
    if not isinstance(value, str) or not isinstance(parsed, dict):
        raise must("be the text of a JSON object")
    return value or "{}"


class Choice(NamedTuple):
    """Whether functions are to be called, and perhaps which."""

    choice: ToolChoice
    allowed: Mapping[str, str] = {}  # their names, by the fields that name them; without any it is all functions
    given: Json | str = "auto"  # as the request says it


def _choice(value: Any) -> Any:
    """Accept a mode, an object that names a function, or one that names all that may be called."""
    match value:
        case "none" | "auto" | "required":
            return Choice(ToolChoice(value), given=value)
        case {"type": "function"} if name := _named(value):
            return Choice(ToolChoice.REQUIRED, {"tool_choice.function.name": name}, value)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools, **more},
            **others,
        }:
            place = "tool_choice.allowed_tools.tools"
            names = {f"{place}[{index}].function.name": _named(tool) for index, tool in enumerate(tools)}
            if all(names.values()) and not (more or others):
                return Choice(ToolChoice(mode), names, value)
    raise must(
        f'be none, auto, required, {_FUNCTION}, or {{"type": "allowed_tools", "allowed_tools": {{"mode": "auto" or '
        f'"required", "tools": [{_FUNCTION}, ...]}}}}'
    )


def _named(value: Any) -> str:
    """The name in an object that only says which function is meant; empty if it is none."""
    match value:
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not more and not others:
            return name
    return ""


class FunctionFields(Fields):
    """A function that may be called."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: Annotated[str, BeforeValidator(_parameters)] = NO_PARAMETERS
    strict: StrictBool | None = None


class ToolFields(Fields):
    """A tool; there is one type."""

    type: Literal["function"]
    function: FunctionFields


class CalledFields(Fields):
    """The function of a call, and with what it was called."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    arguments: Annotated[str, BeforeValidator(arguments_text)] = "{}"


class ToolCallFields(Fields):
    """A call that an assistant made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFields
    index: Ignored = None  # of streams, which some clients leave in what they send back


ToolList = Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)]
CallList = Annotated[list[ToolCallFields], Field(max_length=MAX_CALLS)]
ToolChoiceField = Annotated[Choice, BeforeValidator(_choice)]


def functions_in(tools: list[ToolFields] | None) -> dict[str, FunctionFields]:
    """The functions of a chat's tools, by their fields."""
    return {f"tools[{index}].function": tool.function for index, tool in enumerate(tools or ())}


def tools_of(given: Mapping[str, FunctionFields], chosen: Choice | None, parallel: bool | None) -> Tools | None:
    """The tools of a request, from its functions by their fields; None without any.

    Raises:
        ApiError: names the invalid field.
    """
    choice, allowed, wanted = chosen or Choice(ToolChoice.AUTO)
    if not given:
        if choice is ToolChoice.REQUIRED or allowed:
            raise invalid("tool_choice", wanted, "be left out, none or auto without tools")
        return None
    functions = tuple(
        Function(fields.name, fields.parameters, fields.description, bool(fields.strict)) for fields in given.values()
    )
    names = [function.name for function in functions]
    for index, (field, name) in enumerate(zip(given, names, strict=True)):
        if name in names[:index]:
            raise invalid(f"{field}.name", name, "be another than those of the tools before it")
    for field, name in allowed.items():
        if name not in names:
            raise invalid(field, name, f"be one of {', '.join(names)[:256]}")
    size = sum(len(function.parameters) + len(function.description or "") for function in functions)
    if size > MAX_TOOLS_CHARACTERS:
        must_be = f"have at most {MAX_TOOLS_CHARACTERS} characters of descriptions and parameters"
        raise invalid("tools", size, must_be)
    return Tools(functions, choice, tuple(allowed.values()), parallel is not False)


def tool_call(fields: ToolCallFields) -> ToolCall:
    """A call of an earlier message."""
    return ToolCall(fields.id, fields.function.name, fields.function.arguments)
