"""Conversations with tools, or with thoughts of earlier answers, as a chat template reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from bough.errors import InvalidRequest
from bough.protocol.generation import ChatPrompt, Function, Message
from bough.tokenization.chat_template import ChatTemplate
from bough.tokenization.template_variables import template_variables
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.tools.harmony import CHANNEL

Fields = dict[str, object]


def has_fields(prompt: ChatPrompt) -> bool:
    """Whether there is more than roles and contents: functions, calls of them, answers to such calls, or thoughts."""
    return prompt.tools is not None or any(m.tool_calls or m.role == "tool" or m.reasoning for m in prompt.messages)


def tool_prompt(prompt: ChatPrompt, tokenizer: Tokenizer) -> list[int]:
    """Tokens of a conversation that has more than roles and contents, up to the start of the assistant's answer.

    Raises InvalidRequest if the model's chat template would leave out a part of it, or rejects it.
    """
    functions = prompt.tools.functions if prompt.tools else ()
    template = tokenizer.tool_template if functions else tokenizer.template
    if functions:
        require_tools(template)
    names: dict[str, str] = {}  # of the functions called so far, by the calls' ids, which clients may use again
    messages = []
    for index, message in enumerate(prompt.messages):
        _require_known(index, message, template)
        names |= {call.call_id: call.name for call in message.tool_calls}
        messages.append(_message(message, names))
    variables = template_variables(prompt.chat_template_kwargs)
    return tokenizer.encode_objects(messages, [_function(f, template) for f in functions], variables)


def require_tools(template: ChatTemplate) -> None:
    """Raise InvalidRequest if a template does not know tools, and so would leave them out."""
    if "tools" not in template.variables:
        raise InvalidRequest("chat.tools", "must be left out, as this model's chat template does not know tools")


def _require_known(index: int, message: Message, template: ChatTemplate) -> None:
    """Refuse what a template would drop in silence, as it does not mention it or reads the first of several alone."""
    if message.tool_calls and "tool_calls" not in template.source:
        name, what = "tool_calls", "be left out, as this model's chat template does not know calls of tools"
    elif message.role == "tool" and "tool" not in template.source:
        name, what = "role", "be another than tool, which this model's chat template does not know"
    elif len(message.tool_calls) > 1 and CHANNEL in template.source:
        name, what = "tool_calls", "be one call, as this model's chat template reads the first alone"
    else:
        return
    raise InvalidRequest(f"chat.messages[{index}].{name}", f"must {what}")


def _message(message: Message, names: Mapping[str, str]) -> Fields:
    """A message with the fields that templates read; `names` are those of the functions called, by the calls' ids."""
    fields: Fields = {"role": message.role, "content": message.content}
    if message.reasoning:  # by either name templates may read it
        fields |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
        if not (message.content and message.tool_calls):  # beside which gpt-oss's template refuses it
            fields["thinking"] = message.reasoning
    if message.tool_calls:  # templates ask whether the field is there
        fields["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
        if message.tool_call_id in names:  # some templates need it, which OpenAI's clients do not send
            fields["name"] = names[message.tool_call_id]
    return fields


def _function(function: Function, template: ChatTemplate) -> Fields:
    # gpt-oss's template writes a description without asking whether there is one.
    is_left_out = function.description is None and CHANNEL not in template.source
    described = {} if is_left_out else {"description": function.description or ""}
    told: Fields = {"name": function.name, **described, "parameters": json.loads(function.parameters)}
    return {"type": "function", "function": told}
