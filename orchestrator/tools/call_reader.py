"""Reads one call as it is generated, in whatever way it is spelled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple


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
