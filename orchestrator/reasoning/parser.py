"""Parts the thoughts of an answer from what follows them, while its text is generated."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from bough.protocol.thoughts import Beginning, Thoughts
from orchestrator.sessions.detokenizer import overlap


class Parted(NamedTuple):
    """A piece of an answer's thoughts, and a piece of what follows them; either may be empty."""

    thoughts: str
    content: str


class _AnswerPart(Enum):
    BEGINNING = auto()  # what comes first is not certain
    THOUGHTS = auto()
    BETWEEN = auto()  # blanks after the thoughts
    CONTENT = auto()


class ReasoningParser:
    """Reads one output. What is certain is told; joined, it is the same in whatever pieces the text came.

    Blanks around thoughts belong to nothing. An output without thoughts is content as it is.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self._thoughts = thoughts
        self._in = _AnswerPart.BEGINNING
        self._text = ""  # not told yet
        self._has_told = False  # some of the thoughts
        self.has_thoughts = False  # the output begins with thoughts, if only with an empty text

    @property
    def is_before_content(self) -> bool:
        """Whether the thoughts have not ended, or what comes first is not certain."""
        return self._in in (_AnswerPart.BEGINNING, _AnswerPart.THOUGHTS)

    def push(self, text: str) -> Parted:
        """Read a further piece of the text."""
        self._text += text
        told, content = "", ""
        if self._in is _AnswerPart.BEGINNING:
            self._read_beginning()
        if self._in is _AnswerPart.THOUGHTS:
            told = self._read_thoughts()
        if self._in is _AnswerPart.BETWEEN:
            self._text = self._text.lstrip()
            self._in = _AnswerPart.CONTENT if self._text else _AnswerPart.BETWEEN
        if self._in is _AnswerPart.CONTENT:
            content, self._text = self._text, ""
        return Parted(told, content)

    def finish(self) -> Parted:
        """What remains at the end of the text, which may be cut off anywhere."""
        rest, self._text = self._text, ""
        if self._in is _AnswerPart.BEGINNING and self._thoughts.beginning is Beginning.INSIDE:
            self._begin_thoughts()
            rest = rest.lstrip()
        if self._in is _AnswerPart.THOUGHTS:
            return Parted(rest.rstrip(), "")
        return Parted("", rest if self._in is _AnswerPart.BEGINNING else "")

    def _read_beginning(self) -> None:
        text, begin = self._text.lstrip(), self._thoughts.begin
        if text.startswith(begin):  # some models repeat the mark that the prompt has
            self._text = text.removeprefix(begin)
            self._begin_thoughts()
        elif not begin.startswith(text):
            if self._thoughts.beginning is Beginning.INSIDE:
                self._begin_thoughts()
            else:
                self._in = _AnswerPart.CONTENT

    def _begin_thoughts(self) -> None:
        self._in, self.has_thoughts = _AnswerPart.THOUGHTS, True

    def _read_thoughts(self) -> str:
        end = self._thoughts.end
        text = self._text if self._has_told else self._text.lstrip()
        thoughts, found, rest = text.partition(end)
        if not found:
            thoughts = text[: len(text) - overlap(text, end)]
        certain = thoughts.rstrip()
        self._text = rest if found else text[len(certain) :]
        self._in = _AnswerPart.BETWEEN if found else _AnswerPart.THOUGHTS
        self._has_told = self._has_told or bool(certain)
        return certain
