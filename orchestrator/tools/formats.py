"""The formats of tool calls, the choice of a model's format, and the rendering of tools and calls by its chat template.

A model's format is the one that its chat template writes, or the one that the operator names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from bough.config.processes import ANY_TOOL_FORMAT, TOOL_FORMATS
from bough.errors import InvalidRequest
from bough.protocol.generation import ChatPrompt, Function, Message
from bough.tokenization.chat_template import ChatTemplate, template_variables
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.tools.call_object import ObjectSyntax
from orchestrator.tools.call_parser import CallSpelling
from orchestrator.tools.harmony import CHANNEL, HARMONY
from orchestrator.tools.named_call import NamedSyntax
from orchestrator.tools.tagged_call import TaggedSyntax
from orchestrator.tools.tool_format import CallRules, ToolFormat

Fields = dict[str, object]


def _marked(call: str, between: str = "") -> CallRules:
    """Rules of calls that each have their own mark, separated by `between`; text may come before and after."""
    return CallRules(
        one=f"mark {call}",
        several=f"mark {call} ({between} mark {call})*",
        free_or_one=f"free | opened {call}",
        free_and_several=f"(opened {call})* free",
    )


# Hermes', which Qwen 2.5 and 3 and many others took over: `<tool_call>{"name", "arguments"}</tool_call>`.
HERMES = ToolFormat(
    name="hermes",
    spelling=CallSpelling(mark="<tool_call>", end="</tool_call>"),
    syntax=ObjectSyntax("arguments"),
    rules=_marked(r'"\n" call "\n" end', r'"\n"'),
    signs=(r"<tool_call>.*arguments", r"<function=|<arg_key>|<parameter="),
)

# Llama 3.1's: a message of `{"name", "parameters"}` alone, perhaps after `<|python_tag|>`. Its templates refuse a
# message of several calls, so several are never required; further calls that the model writes after `;` are read.
_LLAMA_CALL_OR_TEXT = r"mark? call | (/\s*[^{\s](.|\n)*/ free)?"
LLAMA_JSON = ToolFormat(
    name="llama3_json",
    spelling=CallSpelling(mark="<|python_tag|>", separator=";", may_lack_mark=True),
    syntax=ObjectSyntax("parameters"),
    rules=CallRules("call", "call", _LLAMA_CALL_OR_TEXT, _LLAMA_CALL_OR_TEXT),
    signs=(r"\bname\b.*\bparameters\b.*(<\|eot_id\|>|<\|python_tag\|>)", r"<tool_call>|\[TOOL_CALLS\]"),
)

# Mistral's, at the end of a message: `[TOOL_CALLS][{"name", "arguments"}, ...]`.
_ONE_LISTED, _LISTED = '" "? "[" call "]"', '" "? "[" call (", " call)* "]"'
MISTRAL = ToolFormat(
    name="mistral",
    spelling=CallSpelling(mark="[TOOL_CALLS]", end="]", opening="[", separator=","),
    syntax=ObjectSyntax("arguments"),
    rules=CallRules(
        f"mark {_ONE_LISTED}", f"mark {_LISTED}", f"free | opened {_ONE_LISTED}", f"free | opened {_LISTED}"
    ),
    signs=(r"\[TOOL_CALLS\]", r"\[ARGS\]|\[CALL_ID\]"),
    id_prefix="",
    id_length=9,  # its templates refuse other ids
)
# That of its later models: `[TOOL_CALLS]name[ARGS]{...}` for each call.
MISTRAL_NAMED = replace(
    MISTRAL,
    spelling=CallSpelling(mark="[TOOL_CALLS]"),
    syntax=NamedSyntax(after_name="[ARGS]"),
    rules=replace(_marked("call"), free_and_several="free | opened call (mark call)*"),
    signs=(r"\[TOOL_CALLS\].*\[ARGS\]", r"\[CALL_ID\]"),
)

# Qwen3-Coder's and Qwen 3.5's, with a tag for each argument. Seed-OSS has it with other marks.
_QWEN3_TAGS = TaggedSyntax(
    before_name="<function=",
    after_name=">\n",
    before_key="<parameter=",
    after_key=">\n",
    after_value="\n</parameter>\n",
    end="</function>",
)
QWEN3_CODER = replace(
    HERMES,
    name="qwen3_coder",
    syntax=_QWEN3_TAGS,
    signs=(r"<tool_call>.*<function=.*<parameter=", r"<seed:tool_call>"),
)
SEED_OSS = replace(
    QWEN3_CODER,
    name="seed_oss",
    spelling=CallSpelling(mark="<seed:tool_call>", end="</seed:tool_call>"),
    syntax=replace(_QWEN3_TAGS, after_key=">", after_value="</parameter>\n"),
    signs=(r"<seed:tool_call>.*<function=.*<parameter=", r"<tool_call>"),
)

# GLM 4.5's and 4.6's: `<tool_call>name<arg_key>...`. GLM 4.7 and later have no line breaks.
GLM45 = ToolFormat(
    name="glm45",
    spelling=CallSpelling(mark="<tool_call>"),  # the name's end is the call's, as nothing else ends the name
    syntax=TaggedSyntax(
        after_name="\n",
        before_key="<arg_key>",
        after_key="</arg_key>\n<arg_value>",
        after_value="</arg_value>\n",
        end="</tool_call>",
    ),
    rules=_marked("call", r'"\n"'),
    signs=(r"<tool_call>.*<arg_key>", r"</arg_key><arg_value>"),
)
GLM47 = replace(
    GLM45,
    name="glm47",
    syntax=TaggedSyntax(
        before_key="<arg_key>", after_key="</arg_key><arg_value>", after_value="</arg_value>", end="</tool_call>"
    ),
    rules=_marked("call"),
    signs=(r"<tool_call>.*</arg_key><arg_value>", r"<function="),
)

FORMATS = HERMES, LLAMA_JSON, MISTRAL, MISTRAL_NAMED, QWEN3_CODER, SEED_OSS, GLM45, GLM47, HARMONY


def format_of(named: str, template: ChatTemplate) -> ToolFormat:
    """The named format, or for "auto" the one of a template.

    Raises InvalidRequest if the template does not support tools, or writes calls in no known format.
    """
    require_tools(template)
    found = _written_by(template.source, named)
    if found is None:
        raise InvalidRequest(
            "chat.tools",
            "must be left out, as this model's chat template writes calls in none of the known formats, "
            f"{', '.join(TOOL_FORMATS)}; --tool-call-parser of the orchestrator may name one",
        )
    return found


@lru_cache(maxsize=64)  # searching a long template may take a while, and every choice asks
def _written_by(source: str, named: str) -> ToolFormat | None:
    """The known format in which a template writes calls, if any; of several formats with one name, the template's."""
    candidates = [known for known in FORMATS if named in (ANY_TOOL_FORMAT, known.name)]
    for known in candidates:
        sign, other = known.signs
        if re.search(sign, source, re.DOTALL) and not re.search(other, source):
            return known
    return None if named == ANY_TOOL_FORMAT else candidates[0]


def has_fields(prompt: ChatPrompt) -> bool:
    """Whether there is more than roles and contents: functions, calls of them, answers to calls, or reasoning."""
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
    """Refuse what a template would silently drop: fields that it does not mention, or all but the first of several."""
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
    if message.reasoning:  # templates read it by either name
        fields |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
        if not (message.content and message.tool_calls):  # gpt-oss's template refuses both together
            fields["thinking"] = message.reasoning
    if message.tool_calls:  # templates check whether the field exists
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
    # gpt-oss's template writes a description without checking that there is one.
    is_left_out = function.description is None and CHANNEL not in template.source
    described = {} if is_left_out else {"description": function.description or ""}
    fields: Fields = {"name": function.name, **described, "parameters": json.loads(function.parameters)}
    return {"type": "function", "function": fields}
