"""The format of Qwen3-Coder and Qwen 3.5, with a tag for each argument; Seed-OSS has it with other marks."""

from __future__ import annotations

from orchestrator.tools.call_parser import CallSpelling
from orchestrator.tools.hermes import ALLOWED, DEMANDED
from orchestrator.tools.tagged_call import TaggedSyntax
from orchestrator.tools.tool_format import ToolFormat

QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    spelling=CallSpelling(mark="<tool_call>", end="</tool_call>"),
    syntax=TaggedSyntax(
        before_name="<function=",
        after_name=">\n",
        before_key="<parameter=",
        after_key=">\n",
        after_value="\n</parameter>\n",
        end="</function>",
    ),
    demanded=DEMANDED,
    allowed=ALLOWED,
)
SEED_OSS = ToolFormat(
    name="seed_oss",
    spelling=CallSpelling(mark="<seed:tool_call>", end="</seed:tool_call>"),
    syntax=TaggedSyntax(
        before_name="<function=",
        after_name=">\n",
        before_key="<parameter=",
        after_key=">",
        after_value="</parameter>\n",
        end="</function>",
    ),
    demanded=DEMANDED,
    allowed=ALLOWED,
)
