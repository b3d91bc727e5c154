"""Reads one call, a JSON object with a name and arguments, as it is generated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from bough.grammar.grammar import ANY_OBJECT, embedded_schema
from bough.protocol.generation import Function
from orchestrator.tools.call_parser import CallReader, JsonValue, Write

NAME, ARGUMENTS = "name", ("arguments", "parameters")  # keys of a call


@dataclass(frozen=True, slots=True)
class ObjectSyntax:
    """A call that is an object, with the key that templates write for the arguments; any of `ARGUMENTS` is read."""

    arguments_key: str
    texts: Sequence[str] = ()  # the same in every call

    def reader(self, functions: Sequence[Function]) -> CallReader:
        return CallObject()

    def rules(self, name: str, function: Function, write: Write, *, follows_schema: bool) -> list[str]:
        """The rule of this name and its parts: a JSON object with the name and arguments of the schema, or any."""
        # Piece by piece, as JSON of another schema may begin with the same: the lexer does not go back.
        pieces = "{", '"name"', ": ", json.dumps(function.name), ", ", f'"{self.arguments_key}"', ": "
        schema = embedded_schema(function.parameters if follows_schema else ANY_OBJECT)
        return [f'{name}: {" ".join(map(json.dumps, pieces))} {name}_args "}}"', f"{name}_args: %json {schema}"]


class _At(Enum):
    """What is expected next in the object."""

    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()


_STEPS = {(_At.OPEN, "{"): _At.KEY, (_At.COLON, ":"): _At.VALUE, (_At.NEXT, ","): _At.KEY}


class CallObject(CallReader):
    """A call that is an object."""

    def __init__(self) -> None:
        super().__init__()
        self._at = _At.OPEN
        self._value: JsonValue | None = None  # or key, that is being read
        self._key: str | None = None
        self._has_arguments = False

    def push(self, text: str) -> int:
        """Read a piece, up to the end of the name if that is in it.

        A caller that rejects the name therefore has the text after it, however the text was divided.
        """
        index = 0
        while index < len(text) and not self.is_complete and not self.is_malformed:
            if self._value is None:
                index += self._step(text[index])
                continue
            end = self._value.push(text, index)
            if self._at is _At.VALUE and self._key in ARGUMENTS and not self._has_arguments:
                self._new_text += text[index:end]
            index = end
            if self._value.is_whole and self._end_value(self._value.text):
                break
        self.raw += text[:index]
        return index

    def _step(self, character: str) -> int:
        """Read a character outside keys and values; 0 if it does not belong here."""
        if character.isspace():
            return 1
        if following := _STEPS.get((self._at, character)):
            self._at = following
            return 1
        if self._at is _At.NEXT and (character == "}" or self._has_arguments):
            self._end()
            return int(character == "}")  # or it is missing, as with small models
        may_begin = character == '"' if self._at is _At.KEY else self._at is _At.VALUE and character not in ",:}]"
        if may_begin:
            self._value = JsonValue(character)
        else:
            self.is_malformed = True
        return 0

    def _end_value(self, text: str) -> bool:
        """Take a whole key or value; returns whether it is the name. Of repeated keys the first counts."""
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
        if not self._has_arguments:
            self._new_text = "{}"


def _string(text: str) -> str | None:
    """The value of a JSON string; None if it is none."""
    try:
        return str(json.loads(text)) if text.startswith('"') else None
    except ValueError:
        return None
