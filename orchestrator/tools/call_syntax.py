"""What one call looks like: how it is read, and the rules of a grammar that allow nothing else."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from bough.protocol.generation import Function
from bough.tokenization.tokenizer import AddedTokens

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
