"""What an answer to a conversation says: thoughts, content, and calls of tools, as they are found in its text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bough.protocol.generation import Channels, Started, ToolChoice, Tools
from orchestrator.reasoning.parser import HarmonyParser, ReasoningParser
from orchestrator.tools.call_parser import ContentText, Piece
from orchestrator.tools.call_syntax import ArgumentsText, CallBegun
from orchestrator.tools.tool_format import ToolFormat

Formats = Callable[[str], ToolFormat]  # takes a model's name


class ThoughtText(NamedTuple):
    """Text that was thought."""

    text: str


@dataclass(slots=True)
class FunctionCall:
    """A call of a function, as far as it has come."""

    call_id: str
    name: str
    arguments: str = ""


class AnswerContent:
    """The content of one choice so far. Calls are looked for in what follows the thoughts."""

    def __init__(self, choice_id: str, started: Started, tools: Tools | None, formats: Formats) -> None:
        """Ids of calls are made from `choice_id`. A request that was aborted before its model was known has none."""
        self.thoughts: list[str] = []
        self.texts: list[str] = []  # what is neither thought nor call
        self.calls: list[FunctionCall] = []
        self._choice_id = choice_id
        self._num_before_content = 0  # tokens
        may_call = tools is not None and tools.choice is not ToolChoice.NONE and bool(started.model_name)
        self._reasoning: ReasoningParser | HarmonyParser | None = None
        if isinstance(started.thoughts, Channels):
            self._reasoning = HarmonyParser(started.thoughts, has_calls=may_call)
        elif started.thoughts is not None:
            self._reasoning = ReasoningParser(started.thoughts)
        self._format = formats(started.model_name) if may_call else None
        self._parser = self._format.parser(tools) if self._format is not None and tools is not None else None

    @property
    def num_thought(self) -> int | None:
        """Tokens of the thoughts, marks included; None if the model marks no thoughts."""
        return None if self._reasoning is None else self._num_before_content if self.has_thoughts else 0

    @property
    def has_thoughts(self) -> bool:
        """Whether there are thoughts, if only empty ones."""
        return self._reasoning is not None and self._reasoning.has_thoughts

    @property
    def has_called(self) -> bool:
        """Whether there are calls, the last of which is complete."""
        return bool(self.calls) and self._parser is not None and not self._parser.is_in_call

    def pieces(self, texts: Sequence[str], *, is_end: bool = False) -> Iterator[ThoughtText | Piece]:
        """What the texts of further tokens, or the last text, add; each piece is noted as it is given out."""
        # Of messages thoughts may also come after content, so that the order within one round matters.
        each = [(text,) for text in texts] if isinstance(self._reasoning, HarmonyParser) else [texts]
        return self._noted([piece for group in each for piece in self._found(group, is_end=is_end)])

    def _found(self, texts: Sequence[str], *, is_end: bool) -> list[ThoughtText | Piece]:
        thoughts, text = self._parted(texts, is_end=is_end)
        pieces: Iterable[Piece] = [ContentText(text)] if text else []
        if self._parser is not None:
            pieces = (*self._parser.push(text), *(self._parser.finish() if is_end else ()))
        return [*([ThoughtText(thoughts)] if thoughts else []), *pieces]

    def _parted(self, texts: Sequence[str], *, is_end: bool) -> tuple[str, str]:
        if self._reasoning is None:
            return "", "".join(texts)
        parts = []
        for text in texts:
            self._num_before_content += self._reasoning.is_before_content and not is_end
            parts.append(self._reasoning.push(text))
        parts += [self._reasoning.finish()] if is_end else []
        return "".join(part.thoughts for part in parts), "".join(part.content for part in parts)

    def _noted(self, pieces: Iterable[ThoughtText | Piece]) -> Iterator[ThoughtText | Piece]:
        for piece in pieces:
            match piece:
                case ThoughtText(text):
                    self.thoughts.append(text)
                case ContentText(text):
                    self.texts.append(text)
                case CallBegun(name):
                    self.calls.append(FunctionCall(self._call_id(), name))
                case ArgumentsText(text):
                    self.calls[-1].arguments += text
            yield piece

    def _call_id(self) -> str:
        assert self._format is not None
        digest = hashlib.blake2b(f"{self._choice_id}/{len(self.calls)}".encode()).hexdigest()
        return self._format.id_prefix + digest[: self._format.id_length]
