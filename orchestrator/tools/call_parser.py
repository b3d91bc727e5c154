"""Finds the calls of tools in a text as it is generated, and what of it is not part of any.

How a call is read, and the rules of a grammar that allow nothing else, are a `CallSyntax`.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from bough.protocol.generation import Function
from bough.tokenization.tokenizer import AddedTokens
from orchestrator.sessions.detokenizer import overlap

_STRING_STOPS = re.compile(r'["\\]')
_STOPS = re.compile(r'["{}\[\]]')  # within an object or array, outside of strings
_PRIMITIVE_STOPS = re.compile(r"[\s,}\]]")


class CallBegun(NamedTuple):
    """The name of a call is known."""

    name: str


class ArgumentsText(NamedTuple):
    """A further piece of the arguments of the call that began last."""

    text: str


class CallReader(ABC):
    """A call whose text comes piece by piece, of which as much is told as is certain."""

    def __init__(self) -> None:
        self.raw = ""  # all its text so far
        self.is_complete = False
        self.is_malformed = False  # it is nothing that could be a call
        self.is_told = False  # that it has begun
        self.name: str | None = None
        self._untold = ""  # of the arguments

    @abstractmethod
    def push(self, text: str) -> int:
        """Read a piece; returns how many characters of it were read, the others come again before the next piece.

        What is read before a call turns out malformed does not depend on the pieces.
        """

    def told(self) -> list[CallBegun | ArgumentsText]:
        """What has become certain since the last time."""
        pieces: list[CallBegun | ArgumentsText] = []
        if self.name is None:
            return pieces
        if not self.is_told:
            pieces, self.is_told = [CallBegun(self.name)], True
        if self._untold:
            pieces.append(ArgumentsText(self._untold))
            self._untold = ""
        return pieces


Write = Callable[[str], str]  # from a text to a part of a rule


class CallSyntax(Protocol):
    """One way of spelling a call, without the mark before it."""

    @property
    def texts(self) -> Sequence[str]:
        """Texts that are the same in every call, which may be tokens."""

    def reader(self, functions: Sequence[Function]) -> CallReader:
        """Reads one call, perhaps of one of these functions."""

    def rules(self, name: str, function: Function, write: Write, *, follows_schema: bool) -> list[str]:
        """The rule of this name and those that it needs: a call with arguments of the schema, or with any.

        Raises InvalidRequest if the schema cannot be followed.
        """


def written(text: str, added_tokens: AddedTokens) -> str:
    """A text as part of a rule: where the vocabulary has a token for a part of it, models were trained with that."""
    tokens = sorted((token for token in added_tokens if token in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    return " ".join(
        f"<[{added_tokens[part].token_id}]>" if part in added_tokens else json.dumps(part) for part in parts if part
    )


class JsonValue:
    """Finds the end of a JSON value whose text comes piece by piece."""

    def __init__(self, first: str) -> None:
        """`first` is its first character, which is pushed too."""
        self.is_whole = False
        self.text = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._is_primitive = first not in '"{['  # a number, or true, false, null

    def push(self, text: str, begin: int) -> int:
        """Read from `begin`; returns where what belongs to the value ends."""
        end = begin
        while end < len(text) and not self.is_whole:
            end = self._string(text, end) if self._in_string else self._outside(text, end)
        self.text += text[begin:end]
        return end

    def _string(self, text: str, begin: int) -> int:
        if self._escaped:
            self._escaped = False
            return begin + 1
        stop = _STRING_STOPS.search(text, begin)
        if stop is None:
            return len(text)
        end = stop.start()
        self._escaped = text[end] == "\\"
        self._in_string = self._escaped
        self.is_whole = not self._in_string and self._depth == 0
        return end + 1

    def _outside(self, text: str, begin: int) -> int:
        stop = (_PRIMITIVE_STOPS if self._is_primitive else _STOPS).search(text, begin)
        if stop is None:
            return len(text)
        end = stop.start()
        if self._is_primitive:
            self.is_whole = True
            return end
        self._in_string = text[end] == '"'
        self._depth += (text[end] in "{[") - (text[end] in "}]")
        self.is_whole = self._depth == 0 and not self._in_string
        return end + 1


class ContentText(NamedTuple):
    """Text that is not part of a call."""

    text: str


Piece = ContentText | CallBegun | ArgumentsText


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How calls stand in a text. Blanks may stand anywhere between their parts."""

    mark: str  # which begins one call, or all
    end: str = ""  # text after the last call of a mark; empty if there is none
    opening: str = ""  # between the mark and the first call, where it is not left out
    separator: str = ""  # between calls of one mark, which are objects; empty if a mark has one call
    may_lack_mark: bool = False  # a call of a known function, an object, may begin the text without a mark


class _CallPart(Enum):
    CONTENT = auto()
    OPENING = auto()  # between a mark and the first call
    CALL = auto()
    CLOSING = auto()  # between a call and the next, or the end


class CallParser:
    """Reads one output. Pieces are told once they are certain; joined they are the same in whatever parts it came.

    Content has no blanks at its end where there are calls.
    """

    def __init__(self, spelling: CallSpelling, names: Collection[str], read: Callable[[], CallReader]) -> None:
        """`names` are those of the functions that may be called; `read` gives a reader of one call."""
        self._spelling, self._names, self._reader = spelling, frozenset(names), read
        self._in = _CallPart.CONTENT
        self._text = ""  # not read yet
        self._skipped = ""  # blanks, mark and opening before a call of which nothing is told yet
        self._call = read()
        self._is_marked = False
        self._has_begun = False  # something else than blanks has been told
        self.is_in_call = False  # the call that was told last is not complete

    def push(self, text: str) -> list[Piece]:
        """Read a further piece of the text."""
        self._text += text
        readers = {
            _CallPart.CONTENT: self._read_content,
            _CallPart.OPENING: self._read_opening,
            _CallPart.CALL: self._read_call,
            _CallPart.CLOSING: self._read_closing,
        }
        pieces: list[Piece] = []
        while self._text and (more := readers[self._in]()) is not None:
            pieces += more
        return pieces

    def finish(self) -> list[Piece]:
        """What remains at the end of the text, which may be cut off anywhere."""
        if self._in is _CallPart.CALL and not self._call.is_told:
            return self._content(self._skipped + self._call.raw + self._text)
        rest = self._skipped if self._in is _CallPart.OPENING else ""
        return self._content(rest + self._text if self._in in (_CallPart.CONTENT, _CallPart.OPENING) else rest)

    def _read_content(self) -> list[Piece] | None:
        """Read up to a mark; None if nothing more is certain."""
        text, mark = self._text, self._spelling.mark
        blanks = len(text) - len(text.lstrip())
        if self._spelling.may_lack_mark and not self._has_begun and text[blanks : blanks + 1] == "{":
            self._begin_call(text[:blanks], text[blanks:], is_marked=False)
            return []
        begin = text.find(mark)
        certain = text[: begin if begin >= 0 else len(text) - overlap(text, mark)].rstrip()
        self._text = text[len(certain) :]
        if begin >= 0:
            end = begin + len(mark)
            self._skipped, self._text, self._in = text[len(certain) : end], text[end:], _CallPart.OPENING
        elif not certain:
            return None
        return self._content(certain)

    def _read_opening(self) -> list[Piece] | None:
        """Read from a mark to the call after it."""
        rest = self._text.lstrip()
        opening = self._spelling.opening
        if opening and rest.startswith(opening):
            rest = rest.removeprefix(opening).lstrip()
        if not rest:
            return None
        self._begin_call(self._skipped + self._text[: len(self._text) - len(rest)], rest, is_marked=True)
        return []

    def _begin_call(self, skipped: str, rest: str, *, is_marked: bool) -> None:
        self._skipped, self._text, self._is_marked = skipped, rest, is_marked
        self._call, self._in = self._reader(), _CallPart.CALL

    def _read_call(self) -> list[Piece] | None:
        """Read what has come of a call; None if more of it must come."""
        call = self._call
        num_read = call.push(self._text)
        self._text = self._text[num_read:]
        if not self._is_marked and call.name is not None and call.name not in self._names:
            self._in = _CallPart.CONTENT
            return self._content(self._skipped + call.raw)
        told: list[Piece] = [*call.told()]
        if call.is_told:
            self._has_begun, self.is_in_call = True, not call.is_complete
        if call.is_malformed:
            self._in = _CallPart.CONTENT
            return told if call.is_told else self._content(self._skipped + call.raw)
        if call.is_complete:
            self._skipped, self._in = "", _CallPart.CLOSING
            return told
        return told or ([] if num_read else None)

    def _read_closing(self) -> list[Piece] | None:
        """Read from a call to the next, or to the end of the calls."""
        rest, end, separator = self._text.lstrip(), self._spelling.end, self._spelling.separator
        following = rest.removeprefix(separator).lstrip() if separator else ""
        if following.startswith("{"):
            self._begin_call("", following, is_marked=True)
            return []
        if end and rest.startswith(end):
            self._text, self._in = rest.removeprefix(end), _CallPart.CONTENT
            return []
        if not rest or end.startswith(rest) or (separator and not following):
            return None
        self._in = _CallPart.CONTENT
        return []

    def _content(self, text: str) -> list[Piece]:
        if not text or (
            self._has_begun and not text.strip() and self._in is _CallPart.CONTENT and self._call.is_complete
        ):
            return []
        self._has_begun = self._has_begun or bool(text.strip())
        return [ContentText(text)]
