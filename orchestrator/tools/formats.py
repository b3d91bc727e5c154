"""Which format of calls a model has: the one that its chat template writes, or that the operator names."""

from __future__ import annotations

import re
from functools import lru_cache

from bough.config.processes import ANY_TOOL_FORMAT
from bough.errors import InvalidRequest
from bough.tokenization.chat_template import ChatTemplate
from orchestrator.tools.hermes import HERMES
from orchestrator.tools.llama_json import LLAMA_JSON
from orchestrator.tools.mistral import MISTRAL
from orchestrator.tools.tool_format import ToolFormat
from orchestrator.tools.tool_prompt import require_tools

FORMATS = {known.name: known for known in (HERMES, LLAMA_JSON, MISTRAL)}
# What a template must contain, and what it must not, as later models spell calls differently after the same mark.
_SIGNS = {
    HERMES: (r"<tool_call>.*arguments", r"<function=|<arg_key>|<parameter="),
    LLAMA_JSON: (r"\bname\b.*\bparameters\b.*(<\|eot_id\|>|<\|python_tag\|>)", r"<tool_call>|\[TOOL_CALLS\]"),
    MISTRAL: (r"\[TOOL_CALLS\]", r"\[ARGS\]|\[CALL_ID\]"),
}


def format_of(named: str, template: ChatTemplate) -> ToolFormat:
    """The format that is named, or if that is "auto" the one of a template.

    Raises:
        InvalidRequest: the template does not know tools, or writes calls in no known way.
    """
    require_tools(template)
    found = FORMATS[named] if named != ANY_TOOL_FORMAT else _written_by(template.source)
    if found is None:
        raise InvalidRequest(
            "chat.tools: must be left out, as this model's chat template writes calls in none of the known ways, "
            f"{', '.join(FORMATS)}; --tool-call-parser of the orchestrator may name one"
        )
    return found


@lru_cache(maxsize=64)  # of a long template the search may take a while, and every choice asks
def _written_by(source: str) -> ToolFormat | None:
    """The format in which a template writes calls, if it is known."""
    for known, (sign, other) in _SIGNS.items():
        if re.search(sign, source, re.DOTALL) and not re.search(other, source):
            return known
    return None
