"""Separates tool calls from the rest of a text while it is generated.

A `CallSyntax` reads a call, and has the grammar rules that allow nothing else.
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
    """Reads a call incrementally, and returns each part as soon as it is certain."""

    def __init__(self) -> None:
        self.raw = ""  # all its text so far
        self.is_complete = False
        self.is_malformed = False  # the text is no call
        self.is_reported = False  # whether its beginning was returned
        self.name: str | None = None
        self._new_text = ""  # of the arguments

    @abstractmethod
    def push(self, text: str) -> int:
        """Read a piece; returns how many of its characters were read. The others come again before the next piece.

        The text read before a call turns out malformed does not depend on the pieces.
        """

    def new_pieces(self) -> list[CallBegun | ArgumentsText]:
        """The parts that became certain since the last call."""
        pieces: list[CallBegun | ArgumentsText] = []
        if self.name is None:
            return pieces
        if not self.is_reported:
            pieces, self.is_reported = [CallBegun(self.name)], True
        if self._new_text:
            pieces.append(ArgumentsText(self._new_text))
            self._new_text = ""
        return pieces


Write = Callable[[str], str]  # from a text to a part of a rule


class CallSyntax(Protocol):
    """One way of writing a call, without the mark before it."""

    @property
    def texts(self) -> Sequence[str]:
        """Texts that are the same in every call, and may be tokens."""

    def reader(self, functions: Sequence[Function]) -> CallReader:
        """A reader of one call, perhaps of one of these functions."""

    def rules(self, name: str, function: Function, write: Write, *, follows_schema: bool) -> list[str]:
        """The rule of this name and the rules that it needs: a call with arguments of the schema, or with any.

        Raises InvalidRequest if the schema cannot be followed.
        """


def written(text: str, added_tokens: AddedTokens) -> str:
    """A text as part of a rule: if the vocabulary has a token for a part of it, models were trained with that."""
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
        """Read from `begin`; returns where the value's text ends."""
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
    """How calls are marked in a text. Blanks may occur anywhere between their parts."""

    mark: str  # begins one call, or all calls
    end: str = ""  # text after the last call of a mark; empty if there is none
    opening: str = ""  # between the mark and the first call; optional
    separator: str = ""  # between calls of one mark, which are objects; empty if a mark has one call
    may_lack_mark: bool = False  # a call of a known function, an object, may begin the text without a mark


class _CallPart(Enum):
    CONTENT = auto()
    OPENING = auto()  # between a mark and the first call
    CALL = auto()
    CLOSING = auto()  # between a call and the next, or the end


class CallParser:
    """Parses one output incrementally. The joined pieces do not depend on how the text was divided.

    If there are calls, content has no blanks at its end.
    """

    def __init__(self, spelling: CallSpelling, names: Collection[str], read: Callable[[], CallReader]) -> None:
        """`names` are those of the functions that may be called; `read` gives a reader of one call."""
        self._spelling, self._names, self._reader = spelling, frozenset(names), read
        self._in = _CallPart.CONTENT
        self._text = ""  # not read yet
        self._skipped = ""  # blanks, mark and opening before a call of which nothing was returned
        self._call = read()
        self._is_marked = False
        self._has_begun = False  # something other than blanks was returned
        self.is_in_call = False  # the last returned call is incomplete

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
        if self._in is _CallPart.CALL and not self._call.is_reported:
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
        """Read the available text of a call; None if more text is needed."""
        call = self._call
        num_read = call.push(self._text)
        self._text = self._text[num_read:]
        if not self._is_marked and call.name is not None and call.name not in self._names:
            self._in = _CallPart.CONTENT
            return self._content(self._skipped + call.raw)
        pieces: list[Piece] = [*call.new_pieces()]
        if call.is_reported:
            self._has_begun, self.is_in_call = True, not call.is_complete
        if call.is_malformed:
            self._in = _CallPart.CONTENT
            return pieces if call.is_reported else self._content(self._skipped + call.raw)
        if call.is_complete:
            self._skipped, self._in = "", _CallPart.CLOSING
            return pieces
        return pieces or ([] if num_read else None)

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
