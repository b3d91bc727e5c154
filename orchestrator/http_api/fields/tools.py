"""Fields about tools: the tools that may be called, whether they must be, and calls in earlier messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, StrictBool, WithJsonSchema

from bough.config.json_fields import must
from bough.protocol.generation import Function, ToolChoice, Tools
from bough.protocol.sampling_params import MAX_GRAMMAR
from orchestrator.http_api.fields.base import Fields
from orchestrator.http_api.fields.errors import Json, invalid

MAX_TOOLS = 128  # as at OpenAI
MAX_TOOLS_CHARACTERS = MAX_GRAMMAR  # of all descriptions and schemas together
MAX_CALLS = 128  # in one message
FUNCTION_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"  # such names need no escapes in JSON, and are usual for tool servers
NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'


PARAMETERS_SCHEMA: Json = {"type": "object", "properties": {"type": {"const": "object"}}}


def _parameters(value: Any) -> Any:
    """Accept the JSON Schema of an object; its type may be missing."""
    if not isinstance(value, dict):
        raise must("be a JSON Schema")
    schema = value if "type" in value else {"type": "object"} | value
    if schema["type"] != "object":
        raise must('be a JSON Schema of type "object"')
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError as exc:  # 1e999 is read as infinity
        raise must("be a JSON Schema of finite numbers") from exc


def arguments_text(value: Any) -> Any:
    """Accept the text of a JSON object; an empty text counts as an empty object."""
    try:
        parsed = json.loads(value or "{}")
        json.dumps(parsed, ensure_ascii=False).encode()  # a lone escaped surrogate is not valid text
    except (TypeError, ValueError, RecursionError):
        parsed = None
    if not isinstance(value, str) or not isinstance(parsed, dict):
        raise must("be the text of a JSON object")
    return value or "{}"


class FunctionChoice(NamedTuple):
    """Whether functions must be called, and perhaps which."""

    choice: ToolChoice = ToolChoice.AUTO
    allowed: Mapping[str, str] = {}  # their names, by the fields that contain them; empty means all functions
    given: Json | str = "auto"  # the request's value


ANY = FunctionChoice()


class ChoiceSpelling(NamedTuple):
    """An API's form of the tool choice."""

    function: str  # path from an object that names a function to the name
    allowed: str  # path from an object of type "allowed_tools" to the list of such objects
    examples: str  # of both objects

    @property
    def schema(self) -> Json:
        """The JSON Schema of what `choice` accepts; that the functions are among the tools it cannot say."""
        named = _typed("function", {"name": {"type": "string", "pattern": FUNCTION_NAME}}, self.function)
        tools = {"type": "array", "items": named, "minItems": 1, "maxItems": MAX_TOOLS}
        allowed = _typed("allowed_tools", {"mode": {"enum": ["auto", "required"]}, "tools": tools}, self.allowed)
        return {"anyOf": [{"enum": ["none", "auto", "required"]}, named, allowed]}

    def choice(self, value: Any) -> Any:
        """Accept a mode, an object that names a function, or one that lists the allowed functions."""
        if value in ("none", "auto", "required"):
            return FunctionChoice(ToolChoice(value), given=value)
        if name := self._name(value):
            return FunctionChoice(ToolChoice.REQUIRED, {f"tool_choice.{self.function}": name}, value)
        match _fields(value, "allowed_tools", self.allowed):
            case {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools, **more} if not more:
                if len(tools) > MAX_TOOLS:
                    raise must(f"have at most {MAX_TOOLS} tools")
                place = f"tool_choice.{self.allowed}"
                names = {f"{place}[{index}].{self.function}": self._name(tool) for index, tool in enumerate(tools)}
                if all(names.values()):
                    return FunctionChoice(ToolChoice(mode), names, value)
        raise must(f"be none, auto, required, {self.examples}")

    def _name(self, value: Any) -> str:
        """The name in an object that names a function; empty for other objects."""
        match _fields(value, "function", self.function):
            case {"name": str(name), **more} if not more:
                return name
        return ""


def _fields(value: Any, kind: str, path: str) -> Any:
    """The fields of an object of this type at this path; None if it has another form."""
    match value:
        case {"type": named, **fields} if named == kind:
            is_inside = path.startswith(kind)
            return (fields[kind] if list(fields) == [kind] else None) if is_inside else fields
    return None


def _typed(kind: str, fields: Json, path: str) -> Json:
    """The JSON Schema of an object of which `_fields` finds all fields."""
    if path.startswith(kind):
        fields = {kind: _exact(fields)}
    return _exact({"type": {"const": kind}, **fields})


def _exact(fields: Json) -> Json:
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


_NAMED = '{"type": "function", "function": {"name": ...}}'
_IN_CHATS = ChoiceSpelling(
    "function.name",
    "allowed_tools.tools",
    f'{_NAMED}, or {{"type": "allowed_tools", "allowed_tools": {{"mode": "auto" or "required", "tools": [{_NAMED}, '
    "...]}}",
)


class FunctionFields(Fields):
    """A function that may be called."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: Annotated[str, BeforeValidator(_parameters), WithJsonSchema(PARAMETERS_SCHEMA)] = NO_PARAMETERS
    strict: StrictBool = False


class ToolFields(Fields):
    """A tool; there is one type."""

    type: Literal["function"]
    function: FunctionFields


class CalledFields(Fields):
    """The function of a call, and its arguments."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    arguments: Annotated[str, BeforeValidator(arguments_text)] = "{}"


class ToolCallFields(Fields):
    """A call that an assistant made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFields
    ignored = frozenset({"index"})  # from streams; some clients send it back


ToolList = Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)]
CallList = Annotated[list[ToolCallFields], Field(max_length=MAX_CALLS)]
ToolChoiceField = Annotated[FunctionChoice, BeforeValidator(_IN_CHATS.choice), WithJsonSchema(_IN_CHATS.schema)]


def chat_tools(
    tools: Sequence[ToolFields], chosen: FunctionChoice = ANY, *, allows_several: bool = True
) -> Tools | None:
    """The tools of a conversation; None without any. Raises ApiError as `tools_of`."""
    return tools_of([tool.function for tool in tools], ".function", chosen, allows_several=allows_several)


def tools_of(
    given: Sequence[FunctionFields], path: str, chosen: FunctionChoice, *, allows_several: bool
) -> Tools | None:
    """The tools of a request; None without any. `path` leads from an entry of `tools` to its function.

    Raises ApiError naming the invalid field.
    """
    choice, allowed, wanted = chosen
    if not given:
        if choice is ToolChoice.REQUIRED or allowed:
            raise invalid("tool_choice", wanted, "be left out, none or auto without tools")
        return None
    functions = tuple(Function(fields.name, fields.parameters, fields.description, fields.strict) for fields in given)
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"tools[{index}]{path}.name", name, "differ from the earlier tools' names")
    for field, name in allowed.items():
        if name not in names:
            raise invalid(field, name, f"be one of {', '.join(names)[:256]}")
    size = sum(len(function.parameters) + len(function.description or "") for function in functions)
    if size > MAX_TOOLS_CHARACTERS:
        raise invalid("tools", size, f"have at most {MAX_TOOLS_CHARACTERS} characters of descriptions and parameters")
    return Tools(functions, choice, tuple(dict.fromkeys(allowed.values())), allows_several)
