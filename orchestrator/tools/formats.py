"""Which format of calls a model has: the one that its chat template writes, or that the operator names."""

from __future__ import annotations

import re
from functools import lru_cache

from bough.config.processes import ANY_TOOL_FORMAT, TOOL_FORMATS
from bough.errors import InvalidRequest
from bough.tokenization.chat_template import ChatTemplate
from orchestrator.tools.glm import GLM45, GLM47
from orchestrator.tools.harmony import HARMONY
from orchestrator.tools.hermes import HERMES
from orchestrator.tools.llama_json import LLAMA_JSON
from orchestrator.tools.mistral import MISTRAL, MISTRAL_NAMED
from orchestrator.tools.qwen3_coder import QWEN3_CODER, SEED_OSS
from orchestrator.tools.tool_format import ToolFormat
from orchestrator.tools.tool_prompt import require_tools

# What a template must contain, and what it must not, as later models spell calls differently after the same mark.
_SIGNS = {
    HERMES: (r"<tool_call>.*arguments", r"<function=|<arg_key>|<parameter="),
    LLAMA_JSON: (r"\bname\b.*\bparameters\b.*(<\|eot_id\|>|<\|python_tag\|>)", r"<tool_call>|\[TOOL_CALLS\]"),
    MISTRAL: (r"\[TOOL_CALLS\]", r"\[ARGS\]|\[CALL_ID\]"),
    MISTRAL_NAMED: (r"\[TOOL_CALLS\].*\[ARGS\]", r"\[CALL_ID\]"),
    QWEN3_CODER: (r"<tool_call>.*<function=.*<parameter=", r"<seed:tool_call>"),
    SEED_OSS: (r"<seed:tool_call>.*<function=.*<parameter=", r"<tool_call>"),
    GLM45: (r"<tool_call>.*<arg_key>", r"</arg_key><arg_value>"),
    GLM47: (r"<tool_call>.*</arg_key><arg_value>", r"<function="),
    HARMONY: (r"<\|channel\|>commentary", r"<tool_call>"),
}
FORMATS = tuple(_SIGNS)


def format_of(named: str, template: ChatTemplate) -> ToolFormat:
    """The format that is named, or if that is "auto" the one of a template.

    Raises:
        InvalidRequest: the template does not know tools, or writes calls in no known way.
    """
    require_tools(template)
    found = _written_by(template.source, named)
    if found is None:
        raise InvalidRequest(
            "chat.tools: must be left out, as this model's chat template writes calls in none of the known ways, "
            f"{', '.join(TOOL_FORMATS)}; --tool-call-parser of the orchestrator may name one"
        )
    return found


@lru_cache(maxsize=64)  # of a long template the search may take a while, and every choice asks
def _written_by(source: str, named: str) -> ToolFormat | None:
    """The format in which a template writes calls, if it is known: of a named one, which of those with the name."""
    candidates = [known for known in FORMATS if named in (ANY_TOOL_FORMAT, known.name)]
    for known in candidates:
        sign, other = _SIGNS[known]
        if re.search(sign, source, re.DOTALL) and not re.search(other, source):
            return known
    return None if named == ANY_TOOL_FORMAT else candidates[0]
