"""Mistral's format until 2024: `[TOOL_CALLS][{"name", "arguments"}, ...]` at the end of a message."""

from __future__ import annotations

from orchestrator.tools.call_parser import CallSpelling
from orchestrator.tools.tool_format import CallRules, ToolFormat

_ONE = '" "? "[" call "]"'
_SEVERAL = '" "? "[" call (", " call)* "]"'

MISTRAL = ToolFormat(
    name="mistral",
    spelling=CallSpelling(mark="[TOOL_CALLS]", end="]", opening="[", separator=","),
    arguments_key="arguments",
    demanded=CallRules(one=f"mark {_ONE}", several=f"mark {_SEVERAL}"),
    allowed=CallRules(one=f"free | opened {_ONE}", several=f"free | opened {_SEVERAL}"),
    id_prefix="",
    id_length=9,  # its templates refuse others
)
