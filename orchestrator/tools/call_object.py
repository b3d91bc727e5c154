"""Reads one call, a JSON object with a name and arguments, as it is generated."""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import NamedTuple

NAME, ARGUMENTS = "name", ("arguments", "parameters")  # keys of a call
_IN_STRING = re.compile(r'[^"\\]*')
_INSIDE = re.compile(r'[^"{}\[\]]*')  # of an object or array, outside of strings
_PRIMITIVE = re.compile(r"[^\s,}\]]*")


class CallBegun(NamedTuple):
    """The name of a call is known."""

    name: str


class ArgumentsText(NamedTuple):
    """A further piece of the arguments of the call that began last."""

    text: str


class _Value:
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
        end = _end(_IN_STRING, text, begin)
        if end == len(text):
            return end
        self._escaped = text[end] == "\\"
        self._in_string = self._escaped
        self.is_whole = not self._in_string and self._depth == 0
        return end + 1

    def _outside(self, text: str, begin: int) -> int:
        end = _end(_PRIMITIVE if self._is_primitive else _INSIDE, text, begin)
        if end == len(text):
            return end
        if self._is_primitive:
            self.is_whole = True
            return end
        self._in_string = text[end] == '"'
        self._depth += (text[end] in "{[") - (text[end] in "}]")
        self.is_whole = self._depth == 0 and not self._in_string
        return end + 1


class _At(Enum):
    """What is expected next in the object."""

    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()


class CallObject:
    """A call whose text comes piece by piece, of which as much is told as is certain."""

    def __init__(self) -> None:
        self.raw = ""  # all its text so far
        self.is_complete = False
        self.is_malformed = False  # it is no object that could be a call
        self.is_told = False  # that it has begun
        self.name: str | None = None
        self._at = _At.OPEN
        self._value: _Value | None = None  # or key, that is being read
        self._key: str | None = None
        self._has_arguments = False
        self._untold = ""  # of the arguments

    def push(self, text: str) -> int:
        """Read a piece, up to the end of the name if that is in it; returns how many characters of it were read.

        What is read does not depend on the pieces: a caller that wants no call of this name has the text after it.
        """
        index = 0
        while index < len(text) and not self.is_complete and not self.is_malformed:
            if self._value is None:
                index += self._step(text[index])
                continue
            end = self._value.push(text, index)
            if self._at is _At.VALUE and self._key in ARGUMENTS and not self._has_arguments:
                self._untold += text[index:end]
            index = end
            if self._value.is_whole and self._end_value(self._value.text):
                break
        self.raw += text[:index]
        return index

    def told(self) -> list[CallBegun | ArgumentsText]:
        """What has become certain since the last time."""
        pieces: list[CallBegun | ArgumentsText] = []
        if self.name is None:
            return pieces
        if not self.is_told:
            pieces, self.is_told = [CallBegun(self.name)], True
        if self.is_complete and not self._has_arguments:
            self._untold, self._has_arguments = "{}", True
        if self._untold:
            pieces.append(ArgumentsText(self._untold))
            self._untold = ""
        return pieces

    def _step(self, character: str) -> int:
        """Read a character outside of keys and values; 0 if it is not part of what is read here."""
        if character.isspace():
            return 1
        match self._at, character:
            case _At.OPEN, "{":
                self._at = _At.KEY
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.NEXT, ",":
                self._at = _At.KEY
            case _At.NEXT, "}":
                self._end()
            case _At.KEY, '"':
                self._value = _Value(character)
                return 0
            case _At.VALUE, _ if character not in ",:}]":
                self._value = _Value(character)
                return 0
            case _At.NEXT, _ if self._has_arguments:  # a brace forgotten, as small models do
                self._end()
                return 0
            case _, _:
                self.is_malformed = True
                return 0
        return 1

    def _end_value(self, text: str) -> bool:
        """Take a whole key or value; returns whether it is the name. Of keys that come twice the first counts."""
        self._value = None
        if self._at is _At.KEY:
            self._at, self._key = _At.COLON, _string(text)
            return False
        self._at = _At.NEXT
        if self._key == NAME and self.name is None:
            self.name = _string(text) or None
            self.is_malformed = self.name is None
            return not self.is_malformed
        if self._key in ARGUMENTS:
            self._has_arguments = True
        return False

    def _end(self) -> None:
        self.is_malformed = self.name is None
        self.is_complete = not self.is_malformed


def _end(pattern: re.Pattern[str], text: str, begin: int) -> int:
    """Where a match at `begin` ends; the patterns match always, if only nothing."""
    match = pattern.match(text, begin)
    return begin if match is None else match.end()


def _string(text: str) -> str | None:
    """The value of a JSON string; None if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
