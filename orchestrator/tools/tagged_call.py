"""A call of the function's name and, between tags, the name and value of each argument.

The schema decides how a value is read and what the grammar allows: texts as they are, others as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from bough.errors import InvalidRequest
from bough.grammar.grammar import ANY_OBJECT, embedded_schema
from bough.protocol.generation import Function
from orchestrator.sessions.detokenizer import overlap
from orchestrator.tools.call_parser import CallReader, Write
from orchestrator.tools.named_call import NamedCall, NamedSyntax

Schema = dict[str, Any]

TEXT = frozenset({"string"})
_NO_LIST = ("enum", "const", "minProperties", "maxProperties", "patternProperties")
_ANY = r"(.|\n)*"
_NEVER = r"[^\s\S]"  # matches nothing
ALTERNATIVES = ("$ref", "allOf", "anyOf", "oneOf")
_IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array"}  # without a type
_TYPES = {
    bool: "boolean", type(None): "null", int: "number", float: "number", str: "string", list: "array", dict: "object"
}  # fmt: skip
_AS_PYTHON_WRITES = {"True": "true", "False": "false", "None": "null"}  # like some templates
_MAX_DEPTH = 8  # of nested references and alternatives
_MAX_BRANCHES = 64


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
        """A reader of one call; the functions' schemas distinguish texts from other values."""
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
    """A call of this syntax; its arguments are returned as JSON."""

    def __init__(self, syntax: TaggedSyntax, schemas: Mapping[str, str]) -> None:
        """`schemas` are those of the functions' arguments, by name."""
        super().__init__(syntax)
        self._syntax, self._schemas = syntax, schemas
        self._closing = syntax.after_value.strip()
        self._separator = "{"
        self._schema: Schema = {}
        self._types: frozenset[str] | None = None  # JSON types that the value may have; None if unknown
        self._value = ""  # its text so far, unless it is a text

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
        self._new_text += "{}" if self._separator == "{" else "}"
        self._expected, self._step = self._ends[1:], self._read_end
        return end

    def _read_key(self, text: str) -> int | None:
        after = self._syntax.after_key.split()
        end = text.find(after[0])
        if end < 0:
            return None
        key = text[:end].strip()
        self._value, self._types = "", argument_types(self._schema, key)
        self._new_text += f"{self._separator}{json.dumps(key, ensure_ascii=False)}: "
        self._new_text += '"' if self._types == TEXT else ""
        self._separator = ", "
        self._expected, self._step = after, self._read_break
        return end

    def _read_break(self, text: str) -> int | None:
        if not text:
            return None
        self._step = self._read_value
        return int(self._syntax.after_key.endswith("\n") and text.startswith("\n"))

    def _read_value(self, text: str) -> int | None:
        """Read the part of a value that is certain; a line break before its end belongs to the tag."""
        end = text.find(self._closing)
        is_whole, end = end >= 0, end if end >= 0 else len(text) - self._num_uncertain(text)
        value = text[:end]
        if is_whole and self._syntax.after_value.startswith("\n"):
            value = value.removesuffix("\n")
        if self._types == TEXT:
            self._new_text += json.dumps(value, ensure_ascii=False)[1:-1]
        else:
            self._value += value
        if is_whole:
            self._new_text += '"' if self._types == TEXT else json_text(self._value, self._types)
            self._expected, self._step = [self._closing], self._read_arguments
        return end if end or is_whole else None

    def _num_uncertain(self, text: str) -> int:
        return max(overlap(text, self._closing), overlap(text, f"\n{self._closing}"))


class ArgumentRules(NamedTuple):
    """The rules of an argument's value and the text after it; the first rule has this name."""

    name: str
    is_required: bool
    rules: list[str]


def argument_rules(name: str, parameters: str, after_value: str, write: Write) -> dict[str, ArgumentRules]:
    """Rules by the names of a schema's arguments; names of rules begin with `name`. Raises InvalidRequest."""
    root = json.loads(parameters)
    if odd := [key for key in (*ALTERNATIVES, *_NO_LIST) if key in root]:
        raise InvalidRequest("constraint", f"must have no {odd[0]} besides its type, as this model names each argument")
    required, properties = root.get("required", []), dict(root.get("properties", {}))
    properties |= {key: {} for key in required if key not in properties}
    return {
        key: ArgumentRules(rule, key in required, value_rules(rule, schema, root, after_value, write))
        for index, (key, schema) in enumerate(properties.items())
        for rule in [f"{name}_{index}"]
    }


def value_rules(name: str, schema: object, root: Schema, after_value: str, write: Write) -> list[str]:
    """The rule of this name and the rules that it needs, for a value of a schema in `root` and the text after it.

    Raises InvalidRequest if such rules cannot express the schema.
    """
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    closing, tag = after_value.rstrip(), after_value.strip()
    options, rules = list[str](), list[str]()
    for index, branch in enumerate(branches(schema, root)):
        part, types = f"{name}_{index}", types_of(branch)
        if types and types != TEXT:
            options.append(f"{part} {write(after_value)}")
            rules.append(f"{part}: %json {embedded_schema(json.dumps(branch | shared))}")
        elif types and "enum" in branch:
            if unreadable := [text for text in branch["enum"] if tag in text]:
                raise InvalidRequest(
                    "constraint", f"must have no enum with {tag}, which ends it", repr(unreadable[0][:64])
                )
            options += [write(f"{text}{after_value}") for text in branch["enum"]]
        else:
            terminal, after = part.upper(), write(after_value.removeprefix(closing))
            options.append(f"{part} {after}")
            options += [f"{terminal} {token} {after}"] if (token := write(closing)) != json.dumps(closing) else []
            rules += [f"{terminal}: {_text(branch, tag)}", f"{part}[lazy]: {terminal} {json.dumps(closing)}"]
    return [f"{name}: {' | '.join(options)}", *rules]


def _text(schema: Schema, tag: str) -> str:
    """A terminal for texts of a schema; they cannot contain the tag that ends them."""
    if odd := [key for key in (*ALTERNATIVES, "enum") if key in schema]:  # an enum that allows nothing
        raise InvalidRequest("constraint", f"must have no such {odd[0]} of an argument that may be a text")
    terms = [f"/(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"]
    if pattern := schema.get("pattern"):
        terms.append(_found(pattern))
    end = re.escape(tag).replace("/", "\\/")
    return " & ".join([*terms, f"~/{_ANY}{end}{_ANY}/"])


def _found(pattern: str) -> str:
    """A terminal for texts that contain a pattern; its anchors match only the ends of the text."""
    parts = {}  # keyed by pattern, as the later of two parts with the same pattern allows more
    for before, begin in (("", "^"), (_ANY, _NEVER)):
        for after, end in (("", "$"), (_ANY, _NEVER)):
            inner = _anchored(pattern, begin, end)
            parts[inner] = f"/{before}({inner}){after}/"
    return f"({' | '.join(parts.values())})"


def _anchored(pattern: str, begin: str, end: str) -> str:
    """A pattern with its anchors replaced, in llguidance's dialect of Lark."""
    written, depth = "", 0  # of classes of characters
    for part in re.findall(r"\\.|\[\^?\]?|.", pattern, re.DOTALL):
        depth += part.startswith("[") - (part == "]" and depth > 0)
        if depth == 0:
            part = {"^": begin, r"\A": begin, "$": end, r"\z": end}.get(part, part)
        written += {"/": r"\/", "\n": r"\n"}.get(part, part)
    return written


def argument_types(parameters: Schema, key: str) -> frozenset[str] | None:
    """The JSON types that an argument may have, None if the schema does not restrict them; integers are numbers."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    types = [types_of(branch) for branch in branches(schema, parameters)]
    return frozenset[str]().union(*types) if all(types) else None


def json_text(value: str, types: frozenset[str] | None) -> str:
    """A value of one of these types (None is unknown) as JSON: unchanged if it is such JSON, else as a string."""
    word = value.strip()
    if types is not None and "string" not in types:
        word = _AS_PYTHON_WRITES.get(word, word)
    try:
        kind = _TYPES[type(json.loads(word, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        kind = "string"
    is_json = kind != "string" and (types is None or kind in types or "string" not in types)
    return word if is_json else json.dumps(value, ensure_ascii=False)


def types_of(branch: Schema) -> frozenset[str]:
    """The types of JSON of a branch; none if it allows any."""
    if "enum" in branch:
        return frozenset(_TYPES[type(value)] for value in branch["enum"])
    return frozenset("number" if name == "integer" else name for name in branch.get("type", ()))


def branches(schema: object, root: Schema) -> list[Schema]:
    """Alternative schemas for a value: each allows only texts, only other values, or any type.

    An unchecked schema may be malformed; it then counts as one of any type.
    """
    found = list(islice(_split(schema, root, 0), _MAX_BRANCHES + 1))
    return found if len(found) <= _MAX_BRANCHES else [{"anyOf": []}]


def _split(schema: object, root: Schema, depth: int) -> Iterator[Schema]:
    if not isinstance(schema, dict):
        yield {}
    elif depth < _MAX_DEPTH and (within := _alternatives(schema, root)):
        for one in within:
            yield from _split(one, root, depth + 1)
    elif isinstance(values := [schema["const"]] if "const" in schema else schema.get("enum"), list):
        texts = [value for value in values if isinstance(value, str)]
        others = [value for value in values if not isinstance(value, str)]
        lists: list[list[Any]] = [part for part in (texts, others) if part]
        # An empty enum is a branch too: otherwise many of them would be searched in vain for the first.
        yield from ({"enum": part} for part in lists or [[]])
    else:
        named = schema.get("type", [name for key, name in _IMPLIED.items() if key in schema][:1])
        names = [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
        parts = [name for name in names if name == "string"], [name for name in names if name != "string"]
        untyped = {key: value for key, value in schema.items() if key not in ("type", "enum")}
        yield from (untyped | {"type": part} for part in parts if part)
        if not names:
            yield untyped


def _alternatives(schema: Schema, root: Schema) -> list[Schema]:
    """The schemas behind a schema's references or alternatives, each merged with its sibling keywords."""
    for key in ALTERNATIVES:
        given = schema.get(key)
        listed = [_referred(given, root)] if key == "$ref" else given if isinstance(given, list) else []
        within = [one for one in listed if isinstance(one, dict)]
        if within and len(within) == len(listed) and (len(within) == 1 or key in ("anyOf", "oneOf")):
            others = {name: value for name, value in schema.items() if name != key}
            return [others | one for one in within]
    return []


def _referred(reference: object, root: Schema) -> object:
    """The target of a reference within the schema; None if there is none."""
    found: object = root
    for part in str(reference).removeprefix("#/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and Infinity are not JSON
