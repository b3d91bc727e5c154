"""Hermes' format, which Qwen 2.5 and 3 and many others took over: `<tool_call>{"name", "arguments"}</tool_call>`."""

from __future__ import annotations

from orchestrator.tools.call_object import ObjectSyntax
from orchestrator.tools.call_parser import CallSpelling
from orchestrator.tools.tool_format import CallRules, ToolFormat

_CALL = r'mark "\n" call "\n" end'
_OPENED = r'opened "\n" call "\n" end'

DEMANDED = CallRules(one=_CALL, several=rf'{_CALL} ("\n" {_CALL})*')
ALLOWED = CallRules(one=f"free | {_OPENED}", several=f"({_OPENED})* free")

HERMES = ToolFormat(
    name="hermes",
    spelling=CallSpelling(mark="<tool_call>", end="</tool_call>"),
    syntax=ObjectSyntax("arguments"),
    demanded=DEMANDED,
    allowed=ALLOWED,
)
