"""The marks of a model's reasoning, from its template or named by the operator, and the grammar of reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bough.config.processes import ANY_REASONING
from bough.grammar.grammar import before
from bough.protocol.generation import Beginning, Channels, ChatPrompt, Prompt, Reasoning, ReasoningMarks
from bough.tokenization.tokenizer import AddedTokens, Tokenizer
from orchestrator.tools.call_parser import written
from orchestrator.tools.harmony import END, MARKS, MESSAGE, START, messages_grammar
from orchestrator.tools.tool_format import ranges

TAIL = 24  # last tokens of a prompt that are searched for a mark, which may take several tokens


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    begin: str
    end: str
    is_always_inside: bool = False  # a prompt that has not closed reasoning counts as if it had opened it


THINK = ReasoningFormat("<think>", "</think>")
BRACKETS = ReasoningFormat("[THINK]", "[/THINK]")
HARMONY, HARMONY_NAME = ReasoningFormat("<|channel|>", END), "openai_gptoss"  # messages, by headers
# By the names of vLLM's parsers.
FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": replace(THINK, is_always_inside=True),
    "deepseek_v3": THINK,
    "glm45": THINK,
    HARMONY_NAME: HARMONY,
    "qwen3": THINK,
    "mistral": BRACKETS,
}


def reasoning_of(prompt: Prompt, tokens: Sequence[int], tokenizer: Tokenizer, named: str) -> Reasoning | None:
    """The reasoning of an answer to a prompt with these tokens; None if the answer is not parsed.

    Only answers to chats are parsed: the output for other prompts is one text.
    """
    if not isinstance(prompt, ChatPrompt):
        return None
    known = _written_by(tokenizer.template.source) if named == ANY_REASONING else FORMATS.get(named)
    if known is None:
        return None
    end = tokenizer.decode_showing(tokens[-TAIL:], tokenizer.special_tokens).rstrip()
    if known is HARMONY:
        header = end.rpartition(START)[2] if START in end else ""
        return Channels("" if END in header else header)
    if end.endswith(known.end):
        beginning = Beginning.AFTER
    elif known.is_always_inside or end.endswith(known.begin):
        beginning = Beginning.INSIDE
    else:
        beginning = Beginning.BEFORE
    return ReasoningMarks(known.begin, known.end, beginning)


def _written_by(template: str) -> ReasoningFormat | None:
    """The format whose end-of-reasoning mark a template writes or looks for."""
    if HARMONY.begin in template:
        return HARMONY
    return next((known for known in (THINK, BRACKETS) if known.begin in template or known.end in template), None)


def shown(reasoning: Reasoning | None, tokenizer: Tokenizer) -> Mapping[int, str]:
    """The marks that are special tokens, which decoded text would leave out."""
    marks: Sequence[str] = (reasoning.begin, reasoning.end) if isinstance(reasoning, ReasoningMarks) else ()
    marks = MARKS if isinstance(reasoning, Channels) else marks
    return {token_id: text for token_id, text in tokenizer.special_tokens.items() if text in marks}


def after_reasoning(field: str, grammar: str, reasoning: Reasoning, added_tokens: AddedTokens) -> str:
    """The grammar of an output with free reasoning, followed by text of this grammar, which `field` demands.

    Reasoning is text up to its end mark, which is one token or several. It must end if the prompt has opened it;
    otherwise it is optional. Two line breaks may follow it, as models write them.
    Raises InvalidRequest if the grammar would be too large.
    """
    if isinstance(reasoning, Channels):
        is_open = MESSAGE in reasoning.header
        return grammar if is_open else messages_grammar(field, "answer", (), grammar, added_tokens)
    if reasoning.beginning is Beginning.AFTER:
        return grammar
    others = ranges(sorted(token.token_id for text, token in added_tokens.items() if text != reasoning.end))
    end = f" | TEXT? {written(reasoning.end, added_tokens)}" if reasoning.end in added_tokens else ""
    after = "reasoning GAP @answer"
    rules = [
        f"start: {after}" if reasoning.beginning is Beginning.INSIDE else f"start: @answer | GAP begin {after}",
        f"begin: {written(reasoning.begin, added_tokens)}",
        f"reasoning: (TEXT? <[{others}]>)* (spelled{end})" if others else f"reasoning: spelled{end}",
        r"GAP: /\n{0,2}/",
        r"TEXT: /(.|\n)+/",
        rf"spelled[lazy]: /(.|\n)*/ {json.dumps(reasoning.end)}",
    ]
    return before(field, "\n".join(rules), grammar)
