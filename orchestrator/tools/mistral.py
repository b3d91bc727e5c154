"""Mistral's formats, at the end of a message: `[TOOL_CALLS][{"name", "arguments"}, ...]`, and that of later models.

That is `[TOOL_CALLS]name[ARGS]{...}` for each call.
"""

from __future__ import annotations

from orchestrator.tools.call_object import ObjectSyntax
from orchestrator.tools.call_parser import CallSpelling
from orchestrator.tools.named_call import NamedSyntax
from orchestrator.tools.tool_format import CallRules, ToolFormat

_ONE = '" "? "[" call "]"'
_SEVERAL = '" "? "[" call (", " call)* "]"'

MISTRAL = ToolFormat(
    name="mistral",
    spelling=CallSpelling(mark="[TOOL_CALLS]", end="]", opening="[", separator=","),
    syntax=ObjectSyntax("arguments"),
    demanded=CallRules(one=f"mark {_ONE}", several=f"mark {_SEVERAL}"),
    allowed=CallRules(one=f"free | opened {_ONE}", several=f"free | opened {_SEVERAL}"),
    id_prefix="",
    id_length=9,  # its templates refuse others
)
MISTRAL_NAMED = ToolFormat(
    name="mistral",
    spelling=CallSpelling(mark="[TOOL_CALLS]"),
    syntax=NamedSyntax(after_name="[ARGS]"),
    demanded=CallRules(one="mark call", several="(mark call)+"),
    allowed=CallRules(one="free | opened call", several="free | opened call (mark call)*"),
    id_prefix="",
    id_length=9,
)
