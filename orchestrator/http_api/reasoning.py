"""Thoughts in the answer to a conversation, and what a request says of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bough.protocol.thoughts import Channels, Thoughts
from bough.tokenization.template_variables import EFFORT
from orchestrator.http_api.errors import Json
from orchestrator.reasoning.harmony import HarmonyParser
from orchestrator.reasoning.parser import Parted, ReasoningParser


@dataclass(slots=True)
class ChoiceReasoning:
    """The thoughts of one choice, and the text after them, in which calls are looked for."""

    parser: ReasoningParser | HarmonyParser
    thoughts: str = ""
    content: str = ""
    _num_before_content: int = 0  # tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the thoughts so far, marks included."""
        return self._num_before_content if self.parser.has_thoughts else 0

    def groups(self, texts: Sequence[str]) -> Sequence[Sequence[str]]:
        """What may be parted at once: each text by itself where thoughts may also come after content."""
        return [(text,) for text in texts] if isinstance(self.parser, HarmonyParser) else [texts]

    def part(self, texts: Iterable[str], *, is_end: bool = False) -> Parted:
        """Part the texts of further tokens; at the end, of what was held back."""
        parts = []
        for text in texts:
            self._num_before_content += self.parser.is_before_content and not is_end
            parts.append(self.parser.push(text))
        parts += [self.parser.finish()] if is_end else []
        parted = Parted("".join(one.thoughts for one in parts), "".join(one.content for one in parts))
        self.thoughts += parted.thoughts
        self.content += parted.content
        return parted


def template_kwargs(given: Mapping[str, Any] | None, effort: str | None) -> str:
    """Variables of a chat template as JSON; `effort` is one of them, if it is not among those that are given."""
    kwargs = ({} if effort is None else {EFFORT: effort}) | dict(given or {})
    return json.dumps(kwargs, ensure_ascii=False) if kwargs else ""


def reasoning_in(thoughts: Thoughts | Channels | None, *, has_calls: bool) -> ChoiceReasoning | None:
    """The thoughts that a choice may have, in which calls are looked for or not; None if its model has none."""
    if isinstance(thoughts, Channels):
        return ChoiceReasoning(HarmonyParser(thoughts, has_calls=has_calls))
    return None if thoughts is None else ChoiceReasoning(ReasoningParser(thoughts))


def reasoning_fields(text: str | None) -> Json:
    """Thoughts by the name that vLLM has now, and by that which it and others have had, which more clients read."""
    return {"reasoning": text, "reasoning_content": text}
