"""Which marks a model's thoughts have: those in its chat template, or those that the operator names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bough.config.processes import ANY_REASONING
from bough.protocol.generation import ChatPrompt, Prompt
from bough.protocol.thoughts import Beginning, Channels, Thoughts
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.tools.harmony import END, MARKS, START

TAIL = 24  # tokens of a prompt among which a mark at its end is, also where it is no token of its own


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its thoughts."""

    begin: str
    end: str
    is_always_inside: bool = False  # a prompt that has not closed thoughts counts as if it had opened them


THINK = ReasoningFormat("<think>", "</think>")
BRACKETS = ReasoningFormat("[THINK]", "[/THINK]")
HARMONY, HARMONY_NAME = ReasoningFormat("<|channel|>", END), "openai_gptoss"  # of messages whose headers tell all
# By the names of vLLM's parsers.
FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": replace(THINK, is_always_inside=True),
    "deepseek_v3": THINK,
    "glm45": THINK,
    HARMONY_NAME: HARMONY,
    "qwen3": THINK,
    "mistral": BRACKETS,
}


def thoughts_of(prompt: Prompt, tokens: Sequence[int], tokenizer: Tokenizer, named: str) -> Thoughts | Channels | None:
    """The thoughts of an answer to this prompt, whose tokens these are; None where none are looked for.

    Only answers to chats are parsed: what follows other prompts is one text.
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
    return Thoughts(known.begin, known.end, beginning)


def _written_by(template: str) -> ReasoningFormat | None:
    """The format whose end of thoughts a template writes or looks for."""
    if HARMONY.begin in template:
        return HARMONY
    return next((known for known in (THINK, BRACKETS) if known.begin in template or known.end in template), None)


def shown(thoughts: Thoughts | Channels | None, tokenizer: Tokenizer) -> Mapping[int, str]:
    """The marks that are special tokens, which decoded text would leave out."""
    marks: Sequence[str] = (thoughts.begin, thoughts.end) if isinstance(thoughts, Thoughts) else ()
    marks = MARKS if isinstance(thoughts, Channels) else marks
    return {token_id: text for token_id, text in tokenizer.special_tokens.items() if text in marks}
