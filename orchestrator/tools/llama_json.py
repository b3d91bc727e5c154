"""Llama 3.1's format: a message that is `{"name", "parameters"}` alone, perhaps after `<|python_tag|>`.

Its templates refuse a message of several calls, so that is never demanded; what the model writes after `;` is read.
"""

from __future__ import annotations

from orchestrator.tools.call_object import ObjectSyntax
from orchestrator.tools.call_parser import CallSpelling
from orchestrator.tools.tool_format import CallRules, ToolFormat

_CALL_OR_TEXT = r"mark? call | (/\s*[^{\s](.|\n)*/ free)?"

LLAMA_JSON = ToolFormat(
    name="llama3_json",
    spelling=CallSpelling(mark="<|python_tag|>", separator=";", may_lack_mark=True),
    syntax=ObjectSyntax("parameters"),
    demanded=CallRules(one="call", several="call"),
    allowed=CallRules(one=_CALL_OR_TEXT, several=_CALL_OR_TEXT),
)
