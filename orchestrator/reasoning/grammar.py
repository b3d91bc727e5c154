"""Grammars of outputs whose thoughts are free, and of which another grammar has what follows them."""

from __future__ import annotations

import json

from bough.grammar.grammar import before
from bough.protocol.thoughts import Beginning, Channels, Thoughts
from bough.tokenization.tokenizer import AddedTokens
from orchestrator.tools.call_syntax import written
from orchestrator.tools.harmony import MESSAGE, messages_grammar
from orchestrator.tools.tool_format import ranges


def after_thoughts(field: str, grammar: str, thoughts: Thoughts | Channels, added_tokens: AddedTokens) -> str:
    """The grammar of an output whose thoughts are free, and the rest of which has this grammar, that `field` demands.

    Thoughts are text up to the mark of their end, whether that is one token or spelled with several. They must end if
    the prompt has opened them; else there may be none. After them there may be two line breaks, as models write them.
    Raises InvalidRequest if the grammar would be too large.
    """
    if isinstance(thoughts, Channels):
        is_open = MESSAGE in thoughts.header
        return grammar if is_open else messages_grammar(field, "answer", (), grammar, added_tokens)
    if thoughts.beginning is Beginning.AFTER:
        return grammar
    others = ranges(sorted(token.token_id for text, token in added_tokens.items() if text != thoughts.end))
    end = f" | TEXT? {written(thoughts.end, added_tokens)}" if thoughts.end in added_tokens else ""
    after = "thoughts GAP @answer"
    rules = [
        f"start: {after}" if thoughts.beginning is Beginning.INSIDE else f"start: @answer | GAP begin {after}",
        f"begin: {written(thoughts.begin, added_tokens)}",
        f"thoughts: (TEXT? <[{others}]>)* (spelled{end})" if others else f"thoughts: spelled{end}",
        r"GAP: /\n{0,2}/",
        r"TEXT: /(.|\n)+/",
        rf"spelled[lazy]: /(.|\n)*/ {json.dumps(thoughts.end)}",
    ]
    return before(field, "\n".join(rules), grammar)
