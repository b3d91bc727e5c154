"""/v1/responses: from the items of a conversation, and what else its fields ask for, to a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from bough.protocol.generation import ChatPrompt, Message, ToolCall, Tools
from bough.protocol.sampling_params import UNLIMITED
from orchestrator.http_api.fields.constraint import constraint_names, constraint_of
from orchestrator.http_api.fields.errors import invalid
from orchestrator.http_api.fields.options import RequestLimits, template_kwargs
from orchestrator.http_api.fields.tools import MAX_CALLS
from orchestrator.http_api.responses.fields import CallOutput, InputCall, MessageItem, ReasoningItem, ResponseFields

LOGPROBS = "message.output_text.logprobs"  # among `include`

# Names of gRPC fields as clients of this API know them, for error messages.
FIELD_NAMES = {
    "chat.chat_template_kwargs": "chat_template_kwargs",
    "chat.messages": "input",
    "chat.tools": "tools",
    "chat": "input",
    "prompt": "input",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
}


class Conversation(NamedTuple):
    """The items of a request as a prompt."""

    prompt: ChatPrompt
    field_names: dict[str, str]  # as `FIELD_NAMES`, with the field that each message is from


def conversation(fields: ResponseFields, tools: Tools | None) -> Conversation:
    """The prompt of a request: the instructions first, and calls as part of the assistant's message before them.

    Raises ApiError naming the invalid field.
    """
    messages: list[Message] = []
    origins: list[str] = []  # of each message
    thoughts = ""  # of the assistant, before its next message
    if fields.instructions is not None:
        messages, origins = [Message("system", fields.instructions)], ["instructions"]
    for index, item in enumerate(fields.input):
        match item:
            case MessageItem():
                role, reasoning = item.role, thoughts if item.role == "assistant" else ""
                messages.append(Message("system" if role == "developer" else role, item.content, reasoning=reasoning))
                thoughts = ""
            case CallOutput():
                messages.append(Message("tool", item.output, tool_call_id=item.call_id))
            case InputCall():
                if thoughts or not messages or messages[-1].role != "assistant":
                    messages.append(Message("assistant", "", reasoning=thoughts))
                    thoughts = ""
                messages[-1] = _with_call(messages[-1], item, index)
            case ReasoningItem():
                thoughts += item.content
        origins += [f"input[{index}]"] * (len(messages) - len(origins))
    if not messages:
        raise invalid("input", [item.type for item in fields.input], "have more than reasoning")
    kwargs = template_kwargs(fields.chat_template_kwargs, fields.reasoning.effort)
    return Conversation(ChatPrompt(tuple(messages), tools, kwargs), _names(fields, messages, origins))


def _with_call(message: Message, item: InputCall, index: int) -> Message:
    calls = (*message.tool_calls, ToolCall(item.call_id, item.name, item.arguments))
    if len(calls) > MAX_CALLS:
        raise invalid(f"input[{index}]", item.type, f"be one of at most {MAX_CALLS} calls that follow one another")
    return replace(message, tool_calls=calls)


def _names(fields: ResponseFields, messages: Sequence[Message], origins: Sequence[str]) -> dict[str, str]:
    names = FIELD_NAMES | constraint_names(fields, "text.format", "text.format.schema")
    for index, (message, origin) in enumerate(zip(messages, origins, strict=True)):
        names[f"chat.messages[{index}]"] = origin
        if message.role == "tool" or message.tool_calls:  # which the item's type says
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
