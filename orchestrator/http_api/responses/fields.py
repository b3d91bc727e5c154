"""/v1/responses: types and names of its fields, and the conversion of a conversation's items to a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, WithJsonSchema, model_validator

from bough.config.json_fields import must
from bough.protocol.generation import ChatPrompt, Message, ToolCall, Tools
from bough.protocol.sampling_params import UNLIMITED
from orchestrator.http_api.fields.base import Fields, Neutral
from orchestrator.http_api.fields.errors import invalid
from orchestrator.http_api.fields.generation import (
    Effort,
    RequestFields,
    Variables,
    part_schema,
    parts_text,
    schema_text,
)
from orchestrator.http_api.fields.options import RequestLimits, constraint_names, constraint_of, template_kwargs
from orchestrator.http_api.fields.tools import (
    ANY,
    FUNCTION_NAME,
    MAX_CALLS,
    MAX_TOOLS,
    ChoiceSpelling,
    FunctionChoice,
    FunctionFields,
    arguments_text,
)

MAX_METADATA = 16  # as at OpenAI; so are the sizes of keys and values
NOT_KEPT = (
    "responses are not stored; send the items of the conversation so far as input: its cached beginning is not "
    "computed again"
)
# For each type of part, the key of its text; refusals occur in OpenAI's answers.
_SAID = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_RETURNED = {"input_text": "text"}
_REASONING = {"reasoning_text": "text"}
_NAMED = '{"type": "function", "name": ...}'
_CHOICE = ChoiceSpelling(
    "name", "tools", f'{_NAMED}, or {{"type": "allowed_tools", "mode": "auto" or "required", "tools": [{_NAMED}, ...]}}'
)
LOGPROBS = "message.output_text.logprobs"  # among `include`

# Names of gRPC fields in this API, for error messages.
FIELD_NAMES = {
    "chat.chat_template_kwargs": "chat_template_kwargs",
    "chat.messages": "input",
    "chat.tools": "tools",
    "chat": "input",
    "prompt": "input",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
}


class MessageItem(Fields):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(partial(parts_text, keys=_SAID)), WithJsonSchema(part_schema(_SAID))]
    ignored = frozenset({"id", "status", "phase"})


class InputCall(Fields):
    """A call that the model made earlier in the conversation."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    arguments: Annotated[str, BeforeValidator(arguments_text)]
    ignored = frozenset({"id", "status", "caller"})


class CallOutput(Fields):
    """The result of a called function."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Annotated[str, BeforeValidator(partial(parts_text, keys=_RETURNED)), WithJsonSchema(part_schema(_RETURNED))]
    ignored = frozenset({"id", "status", "name", "caller"})


class ReasoningItem(Fields):
    """The model's reasoning before an answer."""

    type: Literal["reasoning"]
    content: Annotated[
        str, BeforeValidator(partial(parts_text, keys=_REASONING)), WithJsonSchema(part_schema(_REASONING))
    ] = ""
    ignored = frozenset({"id", "status", "summary", "encrypted_content"})


class _OtherItem(Fields):
    """An item of another type, which is refused."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"]


InputItem = MessageItem | InputCall | CallOutput | ReasoningItem
_ITEMS: Mapping[Any, type[InputItem]] = {
    "message": MessageItem,
    "function_call": InputCall,
    "function_call_output": CallOutput,
    "reasoning": ReasoningItem,
}


def _item(value: Any) -> Any:
    """Accept an item by its type; errors name the fields of that type."""
    if not isinstance(value, dict):
        raise must("be an object with a type")
    kind = value.get("type") or "message"
    return (_ITEMS.get(kind, _OtherItem) if isinstance(kind, str) else _OtherItem).model_validate(value)


def _schema(value: Any) -> Any:
    if not isinstance(value, dict):
        raise must("be a JSON Schema")
    return schema_text(value)


def _input(value: Any) -> Any:
    """Accept a text as a single user message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise must("be a text, or a list of items")
    return value


def _kept(_: Any) -> Any:
    raise must(f"be left out, as {NOT_KEPT}")


class _TypedFields(Fields):
    type: Literal["function"]  # checked first, as the others depend on it


class FlatToolFields(FunctionFields, _TypedFields):
    """A tool: there is one type, with its fields in the same object."""


class TextFormatFields(Fields):
    """The answer's format."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: StrictBool = True
    json_schema: Annotated[str | None, BeforeValidator(_schema, json_schema_input_type=dict[str, Any])] = Field(
        None, alias="schema"
    )

    @model_validator(mode="after")
    def _require_schema(self) -> TextFormatFields:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise must("have a schema if its type is json_schema, and none otherwise")
        return self


class TextFields(Fields):
    """The answer's format and length."""

    format: TextFormatFields = TextFormatFields(type="text", schema=None)
    ignored = frozenset({"verbosity"})


class ReasoningFields(Fields):
    """The reasoning effort, and what is reported of it."""

    effort: Effort | None = None
    ignored = frozenset({"summary", "generate_summary", "context", "mode"})


class ResponseStreamOptions(Fields):
    """Options of streams, of which none is supported."""

    ignored = frozenset({"include_obfuscation"})


class ResponseFields(RequestFields):
    """Body of /v1/responses."""

    input: Annotated[
        list[Annotated[InputItem, BeforeValidator(_item)]],
        Field(fail_fast=True),
        BeforeValidator(_input, json_schema_input_type=str | Annotated[list[InputItem], Field(min_length=1)]),
    ]
    instructions: str | None = None
    max_output_tokens: StrictInt | None = None
    text: TextFields = TextFields()
    tools: list[FlatToolFields] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Annotated[FunctionChoice, BeforeValidator(_CHOICE.choice), WithJsonSchema(_CHOICE.schema)] = ANY
    parallel_tool_calls: StrictBool = True
    reasoning: ReasoningFields = ReasoningFields()
    chat_template_kwargs: Variables = Field(default_factory=dict)
    include: list[
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
    ] = Field(default_factory=list)
    top_logprobs: StrictInt = 0
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = Field(
        default_factory=dict, max_length=MAX_METADATA
    )
    user: Annotated[str, Field(max_length=512)] | None = None  # repeated in each response
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    previous_response_id: Annotated[None, BeforeValidator(_kept)] = None
    conversation: Annotated[None, BeforeValidator(_kept)] = None
    # `max_tool_calls` counts tools that the server runs, and `image` configures images: there are neither.
    ignored = RequestFields.ignored | {"max_tool_calls", "image"}
    neutral: ClassVar[Neutral] = {
        **RequestFields.neutral,
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "truncation": ("disabled",),
        "prompt": (),
        "context_management": ([],),
    }


class Conversation(NamedTuple):
    """The items of a request as a prompt."""

    prompt: ChatPrompt
    field_names: dict[str, str]  # `FIELD_NAMES`, with each message's field


def conversation(fields: ResponseFields, tools: Tools | None) -> Conversation:
    """The prompt of a request: instructions first; calls are merged into the assistant's message before them.

    Raises ApiError naming the invalid field.
    """
    messages: list[Message] = []
    origins: list[str] = []  # of each message
    reasoning_before = ""  # the assistant's, before its next message
    if fields.instructions is not None:
        messages, origins = [Message("system", fields.instructions)], ["instructions"]
    for index, item in enumerate(fields.input):
        match item:
            case MessageItem():
                role, reasoning = item.role, reasoning_before if item.role == "assistant" else ""
                messages.append(Message("system" if role == "developer" else role, item.content, reasoning=reasoning))
                reasoning_before = ""
            case CallOutput():
                messages.append(Message("tool", item.output, tool_call_id=item.call_id))
            case InputCall():
                if reasoning_before or not messages or messages[-1].role != "assistant":
                    messages.append(Message("assistant", "", reasoning=reasoning_before))
                    reasoning_before = ""
                messages[-1] = _with_call(messages[-1], item, index)
            case ReasoningItem():
                reasoning_before += item.content
        origins += [f"input[{index}]"] * (len(messages) - len(origins))
    if not messages:
        raise invalid("input", [item.type for item in fields.input], "have more than reasoning")
    kwargs = template_kwargs(fields.chat_template_kwargs, fields.reasoning.effort)
    return Conversation(ChatPrompt(tuple(messages), tools, kwargs), _names(fields, messages, origins))


def _with_call(message: Message, item: InputCall, index: int) -> Message:
    calls = (*message.tool_calls, ToolCall(item.call_id, item.name, item.arguments))
    if len(calls) > MAX_CALLS:
        raise invalid(f"input[{index}]", item.type, f"be one of at most {MAX_CALLS} consecutive calls")
    return replace(message, tool_calls=calls)


def _names(fields: ResponseFields, messages: Sequence[Message], origins: Sequence[str]) -> dict[str, str]:
    names = FIELD_NAMES | constraint_names(fields, "text.format", "text.format.schema")
    for index, (message, origin) in enumerate(zip(messages, origins, strict=True)):
        names[f"chat.messages[{index}]"] = origin
        if message.role == "tool" or message.tool_calls:  # implied by the item's type
            inner = "role" if message.role == "tool" else "tool_calls"
            names[f"chat.messages[{index}].{inner}"] = f"{origin}.type"
    if fields.instructions is not None:
        names["chat.messages[0].content"] = "instructions"
    return names | {f"chat.tools[{index}].function": f"tools[{index}]" for index in range(len(fields.tools))}


def response_limits(fields: ResponseFields) -> RequestLimits:
    """Limits of the request; by default the answer may fill the context. Raises ApiError naming the invalid field."""
    has_logprobs, form = LOGPROBS in fields.include, fields.text.format
    if fields.top_logprobs and not has_logprobs:
        raise invalid("top_logprobs", fields.top_logprobs, f"be left out unless include has {LOGPROBS}")
    return RequestLimits(
        UNLIMITED if fields.max_output_tokens is None else fields.max_output_tokens,
        fields.top_logprobs if has_logprobs else None,
        constraint=constraint_of("text.format", form.type, form.json_schema, fields),
    )
