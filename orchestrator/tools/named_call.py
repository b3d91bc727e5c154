"""A call that is its function's name and a JSON object of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bough.grammar.grammar import ANY_OBJECT, embedded_schema
from bough.protocol.generation import Function
from orchestrator.tools.call_parser import CallReader, JsonValue, Write

NAME = "[A-Za-z0-9_.:/-]+"  # of a function
_NAME = re.compile(rf"\s*({NAME})?")


@dataclass(frozen=True, kw_only=True)
class NamedSyntax:
    """Texts around name and arguments, with the blanks that templates write; any are read."""

    before_name: str = ""
    after_name: str = ""
    end: str = ""

    @property
    def texts(self) -> Sequence[str]:
        return [*self.before_name.split(), *self.after_name.split(), *self.end.split()]

    def reader(self, functions: Sequence[Function]) -> CallReader:
        return NamedCall(self)

    def rules(self, name: str, function: Function, write: Write, *, follows_schema: bool) -> list[str]:
        """The rule of this name and its parts: the function's name, then arguments of the schema, or any."""
        schema = embedded_schema(function.parameters if follows_schema else ANY_OBJECT)
        begin = write(f"{self.before_name}{function.name}{self.after_name}")
        return [f"{name}: {begin} {name}_args {write(self.end)}", f"{name}_args: %json {schema}"]


class NamedCall(CallReader):
    """A call of this syntax, read in steps: each returns how much it read, or None if it needs more text."""

    def __init__(self, syntax: NamedSyntax) -> None:
        super().__init__()
        self._ends = syntax.end.split()
        self._after_name = syntax.after_name.split()
        # Texts that must come before the next step; blanks may come between.
        self._expected = syntax.before_name.split()
        self._step: Callable[[str], int | None] = self._read_name
        self._called = ""  # the name, while it is undecided whether this is a call
        self._object = JsonValue("{")

    def push(self, text: str) -> int:
        index = 0
        while not (self.is_complete or self.is_malformed):
            rest = text[index:]
            read = self._read_expected(rest) if self._expected else self._step(rest)
            if read is None:
                break
            index += read
        self.raw += text[:index]
        return index

    def _read_expected(self, text: str) -> int | None:
        end = self._end_of(text, self._expected[0])
        if end:
            self._expected = self._expected[1:]
        return end

    def _end_of(self, text: str, *allowed: str) -> int | None:
        """Where the allowed text after blanks ends: 0 if there is none, None if more text is needed."""
        rest = text.lstrip()
        for one in allowed:
            if rest.startswith(one):
                return len(text) - len(rest) + len(one)
        self.is_malformed = not any(one.startswith(rest) for one in allowed)
        return 0 if self.is_malformed else None

    def _read_name(self, text: str) -> int | None:
        match = _NAME.match(text)
        end = match.end() if match is not None else 0
        if end == len(text):
            return None
        self._called = text[:end].strip()
        self.is_malformed = not self._called
        self._expected, self._step = self._after_name, self._read_arguments
        return end

    def _read_arguments(self, text: str) -> int | None:
        if self.name is None:
            if not (end := self._end_of(text, "{")):
                return end
            self.name = self._called
            return end - 1  # the brace is read as part of the object
        end = self._object.push(text, 0)
        self._new_text += text[:end]
        if self._object.is_whole:
            self._expected, self._step = self._ends, self._read_end
        return end or None

    def _read_end(self, text: str) -> int:
        self.is_complete = True
        return 0
