"""A call that is its function's name and, between tags, the name and value of each argument."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bough.errors import InvalidRequest
from bough.grammar.grammar import ANY_OBJECT
from bough.protocol.generation import Function
from orchestrator.sessions.detokenizer import overlap
from orchestrator.tools.argument_types import TEXT, Schema, argument_types, json_text
from orchestrator.tools.call_syntax import CallReader, Write
from orchestrator.tools.named_call import NamedCall, NamedSyntax
from orchestrator.tools.tagged_rules import argument_rules, value_rules


@dataclass(frozen=True, kw_only=True)
class TaggedSyntax(NamedSyntax):
    """Texts around the names and values of arguments; a line break next to a value belongs to the tag."""

    before_key: str
    after_key: str
    after_value: str

    @property
    def texts(self) -> Sequence[str]:
        return [*super().texts, self.before_key, *self.after_key.split(), self.after_value.strip()]

    def reader(self, functions: Sequence[Function]) -> CallReader:
        """Reads one call, perhaps of one of these functions, whose schemas tell texts from other values."""
        return TaggedCall(self, {function.name: function.parameters for function in functions})

    def rules(self, name: str, function: Function, write: Write, *, follows_schema: bool) -> list[str]:
        """The rule of this name and its parts: the name, then a tag for each argument of the schema, or for any."""
        begin = write(f"{self.before_name}{function.name}{self.after_name}")
        if not follows_schema:
            key = f"{write(self.before_key)} /[^<>\\s]+/ {write(self.after_key)}"
            value = value_rules(f"{name}_value", {}, {}, self.after_value, write)
            return [f"{name}: {begin} ({key} {name}_value)* {write(self.end)}", *value]
        values = argument_rules(name, function.parameters, self.after_value, write)
        tag = self.after_key.split()[0]
        if odd := [key for key in values if tag in key or key != key.strip()]:
            must = f"have no {tag} in a property's name, and no blanks around it"
            raise InvalidRequest("constraint", f"must {must}", repr(odd[0][:64]))
        arguments = [
            f"({write(f'{self.before_key}{key}{self.after_key}')} {value.name}){'' if value.is_required else '?'}"
            for key, value in values.items()
        ]
        rules = [rule for value in values.values() for rule in value.rules]
        return [f"{name}: {begin} {' '.join(arguments)} {write(self.end)}", *rules]


class TaggedCall(NamedCall):
    """A call of this syntax, whose arguments are told as JSON."""

    def __init__(self, syntax: TaggedSyntax, schemas: Mapping[str, str]) -> None:
        """`schemas` are those of the functions' arguments, by name."""
        super().__init__(syntax)
        self._syntax, self._schemas = syntax, schemas
        self._closing = syntax.after_value.strip()
        self._separator = "{"
        self._schema: Schema = {}
        self._types: frozenset[str] | None = None  # of JSON, that the value may have; None if they are not known
        self._value = ""  # what has come of it, unless it is a text

    def _read_arguments(self, text: str) -> int | None:
        """Read what comes before an argument, or the end."""
        syntax = self._syntax
        if not (end := self._end_of(text, syntax.before_key, self._ends[0])):
            return end
        if self.name is None:
            self.name = self._called
            self._schema = json.loads(self._schemas.get(self.name, ANY_OBJECT))
        if text[:end].endswith(syntax.before_key):
            self._step = self._read_key
            return end
        self._untold += "{}" if self._separator == "{" else "}"
        self._expected, self._step = self._ends[1:], self._read_end
        return end

    def _read_key(self, text: str) -> int | None:
        after = self._syntax.after_key.split()
        end = text.find(after[0])
        if end < 0:
            return None
        key = text[:end].strip()
        self._value, self._types = "", argument_types(self._schema, key)
        self._untold += f"{self._separator}{json.dumps(key, ensure_ascii=False)}: "
        self._untold += '"' if self._types == TEXT else ""
        self._separator = ", "
        self._expected, self._step = after, self._read_break
        return end

    def _read_break(self, text: str) -> int | None:
        if not text:
            return None
        self._step = self._read_value
        return int(self._syntax.after_key.endswith("\n") and text.startswith("\n"))

    def _read_value(self, text: str) -> int | None:
        """Read of a value what is certain to be of it: the line break before its end is not."""
        end = text.find(self._closing)
        is_whole, end = end >= 0, end if end >= 0 else len(text) - self._kept(text)
        value = text[:end]
        if is_whole and self._syntax.after_value.startswith("\n"):
            value = value.removesuffix("\n")
        if self._types == TEXT:
            self._untold += json.dumps(value, ensure_ascii=False)[1:-1]
        else:
            self._value += value
        if is_whole:
            self._untold += '"' if self._types == TEXT else json_text(self._value, self._types)
            self._expected, self._step = [self._closing], self._read_arguments
        return end if end or is_whole else None

    def _kept(self, text: str) -> int:
        return max(overlap(text, self._closing), overlap(text, f"\n{self._closing}"))
