"""The formats of GLM 4.5 and 4.6, and of GLM 4.7 and later, which has no line breaks: `<tool_call>name<arg_key>...`."""

from __future__ import annotations

from orchestrator.tools.call_parser import CallSpelling
from orchestrator.tools.tagged_call import TaggedSyntax
from orchestrator.tools.tool_format import CallRules, ToolFormat

_SPELLING = CallSpelling(mark="<tool_call>")  # whose end is that of the call, as nothing else ends its name

GLM45 = ToolFormat(
    name="glm45",
    spelling=_SPELLING,
    syntax=TaggedSyntax(
        after_name="\n",
        before_key="<arg_key>",
        after_key="</arg_key>\n<arg_value>",
        after_value="</arg_value>\n",
        end="</tool_call>",
    ),
    demanded=CallRules(one="mark call", several=r'mark call ("\n" mark call)*'),
    allowed=CallRules(one="free | opened call", several="(opened call)* free"),
)
GLM47 = ToolFormat(
    name="glm47",
    spelling=_SPELLING,
    syntax=TaggedSyntax(
        before_key="<arg_key>", after_key="</arg_key><arg_value>", after_value="</arg_value>", end="</tool_call>"
    ),
    demanded=CallRules(one="mark call", several="(mark call)+"),
    allowed=CallRules(one="free | opened call", several="(opened call)* free"),
)
