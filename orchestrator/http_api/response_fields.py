"""Types and names of the fields of /v1/responses that no other path has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, model_validator

from bough.config.json_fields import must
from bough.protocol.generation import ToolChoice
from orchestrator.http_api.base_fields import Fields, Ignored
from orchestrator.http_api.fields import Effort, RequestFields, parts_text, schema_text
from orchestrator.http_api.tool_fields import FUNCTION_NAME, MAX_TOOLS, Choice, FunctionFields, arguments_text
from orchestrator.http_api.unsupported import Unsupported

MAX_METADATA = 16  # as at OpenAI; so are the sizes of keys and values
NOT_KEPT = (
    "responses are not kept; send the items of the conversation so far as input, whose beginning is found by itself "
    "and not computed again"
)
_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # a refusal, as in OpenAI's answers


def _said(value: Any) -> Any:
    return parts_text(value, _PARTS)


def _output(value: Any) -> Any:
    return parts_text(value, {"input_text": "text"})


def _thought(value: Any) -> Any:
    return parts_text(value, {"reasoning_text": "text"})


class MessageItem(Fields):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_said)]
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class CallItem(Fields):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    arguments: Annotated[str, BeforeValidator(arguments_text)]
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None


class OutputItem(Fields):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Annotated[str, BeforeValidator(_output)]
    id: Ignored = None
    status: Ignored = None
    name: Ignored = None
    caller: Ignored = None


class ReasoningItem(Fields):
    """What the model thought before it answered."""

    type: Literal["reasoning"]
    id: Ignored = None
    status: Ignored = None
    summary: Ignored = None
    content: Annotated[str, BeforeValidator(_thought)] = ""
    encrypted_content: Ignored = None


class _OtherItem(Fields):
    """An item of another type, which is refused."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"]


Item = MessageItem | CallItem | OutputItem | ReasoningItem
_ITEMS: Mapping[Any, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


def _item(value: Any) -> Any:
    """Accept an item, by its type: the fields of an invalid one are named as those of that type."""
    if not isinstance(value, dict):
        raise must("be an object with a type")
    kind = value.get("type") or "message"
    return (_ITEMS.get(kind, _OtherItem) if isinstance(kind, str) else _OtherItem).model_validate(value)


def _schema(value: Any) -> Any:
    if not isinstance(value, dict):
        raise must("be a JSON Schema")
    return schema_text(value)


def _input(value: Any) -> Any:
    """Accept a text as the only message, a user's."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise must("be a text, or a list of items")
    return value


def _function(value: Any) -> Any:
    if value != "function":
        raise must("be function: no tools are run here, but those of the client called")
    return value


def _choice(value: Any) -> Any:
    """Accept a mode, an object that names a function, or one that names all that may be called."""
    match value:
        case "none" | "auto" | "required":
            return Choice(ToolChoice(value), given=value)
        case {"type": "function"} if name := _named(value):
            return Choice(ToolChoice.REQUIRED, {"tool_choice.name": name}, value)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [_, *_] as tools, **more}:
            names = {f"tool_choice.tools[{index}].name": _named(tool) for index, tool in enumerate(tools)}
            if all(names.values()) and not more:
                return Choice(ToolChoice(mode), names, value)
    raise must(
        'be none, auto, required, {"type": "function", "name": ...}, or {"type": "allowed_tools", "mode": "auto" or '
        '"required", "tools": [{"type": "function", "name": ...}, ...]}'
    )


def _named(value: Any) -> str:
    """The name in an object that only says which function is meant; empty if it is none."""
    match value:
        case {"type": "function", "name": str(name), **more} if not more:
            return name
    return ""


def _kept(_: Any) -> Any:
    raise must(f"be left out, as {NOT_KEPT}")


class _TypedFields(Fields):
    type: Annotated[str, BeforeValidator(_function)]  # before all others, which depend on it


class FlatToolFields(FunctionFields, _TypedFields):
    """A tool: there is one type, whose fields stand beside it."""


class TextFormatFields(Fields):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: StrictBool | None = None
    json_schema: Annotated[str | None, BeforeValidator(_schema)] = Field(None, alias="schema")

    @model_validator(mode="after")
    def _require_schema(self) -> TextFormatFields:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise must("have a schema if its type is json_schema, and none otherwise")
        return self


class TextFields(Fields):
    """What the answer must be, and how long."""

    format: TextFormatFields | None = None
    verbosity: Ignored = None


class ReasoningFields(Fields):
    """How much the model is to think, and what is told of it."""

    effort: Effort | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None
    mode: Ignored = None


class ResponseStreamOptions(Fields):
    """Nothing about streams can be chosen."""

    include_obfuscation: Ignored = None


class ResponseFields(RequestFields):
    """Body of /v1/responses."""

    input: Annotated[list[Annotated[Item, BeforeValidator(_item)]], BeforeValidator(_input)]
    instructions: str | None = None
    max_output_tokens: StrictInt | None = None
    text: TextFields | None = None
    tools: Annotated[list[FlatToolFields], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Choice, BeforeValidator(_choice)] | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning: ReasoningFields | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: (
        list[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "message.input_image.image_url",
                "web_search_call.action.sources",
                "web_search_call.results",
                "file_search_call.results",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
            ]
        ]
        | None
    ) = None
    top_logprobs: StrictInt | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    user: Annotated[str, Field(max_length=512)] | None = None  # told again in each response
    stream_options: ResponseStreamOptions | None = None
    previous_response_id: Annotated[None, BeforeValidator(_kept)] = None
    conversation: Annotated[None, BeforeValidator(_kept)] = None
    background: Unsupported = None
    truncation: Unsupported = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None
    max_tool_calls: Ignored = None  # of tools that are run by the server, of which there are none
    prompt_cache_options: Ignored = None
