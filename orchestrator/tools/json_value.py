"""Finds where JSON ends in a text that comes piece by piece."""

from __future__ import annotations

import re

_STRING_STOPS = re.compile(r'["\\]')
_STOPS = re.compile(r'["{}\[\]]')  # within an object or array, outside of strings
_PRIMITIVE_STOPS = re.compile(r"[\s,}\]]")


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
