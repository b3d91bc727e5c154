"""Separates an answer's reasoning from its content, by marks or by messages, while the text is generated."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import NamedTuple

from bough.protocol.generation import Beginning, Channels, ReasoningMarks
from orchestrator.sessions.detokenizer import overlap
from orchestrator.tools.harmony import CALL, CHANNEL, CONSTRAIN, MARKS, MESSAGE, RECIPIENT, START
from orchestrator.tools.named_call import NAME

_HEADER_BEGINS = CHANNEL, MESSAGE, START, "to="
_CHANNEL, _RECIPIENT = re.compile(re.escape(CHANNEL) + r"\s*(\w+)"), re.compile(r"\bto=([^\s<]+)")
_FUNCTION = re.compile(re.escape(RECIPIENT) + f"({NAME})")


class Parted(NamedTuple):
    """A piece of an answer's reasoning, and a piece of the content after it; either may be empty."""

    reasoning: str
    content: str


class _AnswerPart(Enum):
    BEGINNING = auto()  # undecided whether reasoning comes first
    REASONING = auto()
    BETWEEN = auto()  # blanks after the reasoning
    CONTENT = auto()


class ReasoningParser:
    """Parses one output incrementally. The joined pieces do not depend on how the text was divided.

    Blanks around reasoning are dropped. An output without reasoning is all content.
    """

    def __init__(self, marks: ReasoningMarks) -> None:
        self._marks = marks
        self._in = _AnswerPart.BEGINNING
        self._text = ""  # read, and not returned yet
        self._has_returned = False  # whether some reasoning was returned
        self.has_reasoning = False  # the output begins with reasoning, which may be empty

    @property
    def is_before_content(self) -> bool:
        """Whether the reasoning has not ended, or it is undecided whether there is any."""
        return self._in in (_AnswerPart.BEGINNING, _AnswerPart.REASONING)

    def push(self, text: str) -> Parted:
        """Read a further piece of the text."""
        self._text += text
        reasoning, content = "", ""
        if self._in is _AnswerPart.BEGINNING:
            self._read_beginning()
        if self._in is _AnswerPart.REASONING:
            reasoning = self._read_reasoning()
        if self._in is _AnswerPart.BETWEEN:
            self._text = self._text.lstrip()
            self._in = _AnswerPart.CONTENT if self._text else _AnswerPart.BETWEEN
        if self._in is _AnswerPart.CONTENT:
            content, self._text = self._text, ""
        return Parted(reasoning, content)

    def finish(self) -> Parted:
        """What remains at the end of the text, which may be cut off anywhere."""
        rest, self._text = self._text, ""
        if self._in is _AnswerPart.BEGINNING and self._marks.beginning is Beginning.INSIDE:
            self._begin_reasoning()
            rest = rest.lstrip()
        if self._in is _AnswerPart.REASONING:
            return Parted(rest.rstrip(), "")
        return Parted("", rest if self._in is _AnswerPart.BEGINNING else "")

    def _read_beginning(self) -> None:
        text, begin = self._text.lstrip(), self._marks.begin
        if text.startswith(begin):  # some models repeat the mark that the prompt has
            self._text = text.removeprefix(begin)
            self._begin_reasoning()
        elif not begin.startswith(text):
            if self._marks.beginning is Beginning.INSIDE:
                self._begin_reasoning()
            else:
                self._in = _AnswerPart.CONTENT

    def _begin_reasoning(self) -> None:
        self._in, self.has_reasoning = _AnswerPart.REASONING, True

    def _read_reasoning(self) -> str:
        end = self._marks.end
        text = self._text if self._has_returned else self._text.lstrip()
        reasoning, found, rest = text.partition(end)
        if not found:
            reasoning = text[: len(text) - overlap(text, end)]
        certain = reasoning.rstrip()
        self._text = rest if found else text[len(certain) :]
        self._in = _AnswerPart.BETWEEN if found else _AnswerPart.REASONING
        self._has_returned = self._has_returned or bool(certain)
        return certain


class _MessagePart(Enum):
    BEGINNING = auto()  # undecided whether the output begins with a header
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    BEFORE_CALL = auto()  # undecided whether the body is an object
    CALL = auto()


class HarmonyParser:
    """Parses one output incrementally. The joined pieces do not depend on how the text was divided.

    Calls become part of the content, as `orchestrator.tools.harmony.HARMONY` reads them. Without `has_calls`, and in
    messages to anything but a function, their text counts as reasoning. An output without headers is all content.
    """

    def __init__(self, channels: Channels, *, has_calls: bool) -> None:
        self._header, self._has_calls = channels.header, has_calls
        self._name = ""  # of the function that is called
        self._in = _MessagePart.BEGINNING
        self._text = ""  # read, and not returned yet
        self._gap = dict.fromkeys((_MessagePart.REASONING, _MessagePart.CONTENT), "")  # before a kind's next message
        self.has_reasoning = False
        self.is_before_content = True
        if MESSAGE in channels.header:
            self._begin_body(channels.header.partition(MESSAGE)[0])

    def push(self, text: str) -> Parted:
        """Read a further piece of the text."""
        self._text += text
        reasoning, content = "", ""
        while (read := self._read()) is not None:
            reasoning, content = reasoning + read.reasoning, content + read.content
        return Parted(reasoning, content)

    def finish(self) -> Parted:
        """What remains at the end of the text, which may be cut off anywhere; a cut-off header is dropped."""
        rest, self._text = self._text, ""
        if self._in is _MessagePart.BEGINNING and not any(mark in rest for mark in MARKS):
            self._in = _MessagePart.CONTENT
        is_open = self._in in (_MessagePart.REASONING, _MessagePart.CONTENT, _MessagePart.CALL) and bool(rest)
        return self._piece(rest) if is_open else Parted("", "")

    def _read(self) -> Parted | None:
        """Read what is certain; None if more must come."""
        if self._in is _MessagePart.BEGINNING:
            text = self._text.lstrip()
            if not text or any(mark.startswith(text) for mark in _HEADER_BEGINS):
                return None
            self._in = _MessagePart.HEADER if text.startswith(_HEADER_BEGINS) else _MessagePart.CONTENT
            self.is_before_content = self._in is _MessagePart.HEADER
        if self._in is _MessagePart.HEADER:
            header, found, rest = self._text.partition(MESSAGE)
            if not found:
                return None
            self._text = rest
            self._begin_body(self._header + header)
        if self._in is _MessagePart.BEFORE_CALL:
            return self._read_call_begin()
        return self._read_body()

    def _begin_body(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._header = ""
        if recipient is not None:
            function = _FUNCTION.fullmatch(recipient[1]) if self._has_calls else None
            self._name = function[1] if function is not None else ""
            self._in = _MessagePart.REASONING if function is None else _MessagePart.BEFORE_CALL
        else:
            self._in = (
                _MessagePart.REASONING if channel is not None and channel[1] == "analysis" else _MessagePart.CONTENT
            )
        self.has_reasoning = self.has_reasoning or self._in is _MessagePart.REASONING
        self.is_before_content = self.is_before_content and self._in is _MessagePart.REASONING

    def _read_call_begin(self) -> Parted | None:
        """Begin a call if its body is an object; other text sent to a function counts as reasoning."""
        body = self._text.lstrip()
        if not body:
            return None
        self._in = _MessagePart.CALL if body.startswith("{") else _MessagePart.REASONING
        self.has_reasoning = self.has_reasoning or self._in is _MessagePart.REASONING
        return Parted("", f"{CALL}{self._name}{MESSAGE}") if self._in is _MessagePart.CALL else Parted("", "")

    def _read_body(self) -> Parted | None:
        text = self._text
        found = min(((begin, mark) for mark in MARKS if (begin := text.find(mark)) >= 0), default=None)
        if found is None:
            certain = len(text) - max(overlap(text, mark) for mark in MARKS)
            self._text = text[certain:]
            return self._piece(text[:certain]) if certain else None
        begin, mark = found
        parted, is_kept = self._piece(text[:begin]), mark in (START, CHANNEL)  # of the next header
        self._text = text[begin if is_kept else begin + len(mark) :]
        if mark not in (MESSAGE, CONSTRAIN):  # which end nothing, and should not be there
            if self._in in self._gap:
                self._gap[self._in] = "\n"
            self._in = _MessagePart.HEADER
        return parted

    def _piece(self, text: str) -> Parted:
        """A piece of a body, after a line break if messages of its kind came before."""
        if text and self._in in self._gap:
            text, self._gap[self._in] = self._gap[self._in] + text, ""
        return Parted(text, "") if self._in is _MessagePart.REASONING else Parted("", text)
