"""Rules of a grammar for values that stand between tags, by their schemas."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from bough.errors import InvalidRequest
from bough.grammar.grammar import embedded_schema
from orchestrator.tools.argument_types import ALTERNATIVES, TEXT, Schema, branches, types_of
from orchestrator.tools.call_syntax import Write

_NO_LIST = ("enum", "const", "minProperties", "maxProperties", "patternProperties")
_ANY = r"(.|\n)*"
_NEVER = r"[^\s\S]"  # matches nothing


class ArgumentRules(NamedTuple):
    """The rules of an argument's value and the text after it, the first of which has this name."""

    name: str
    is_required: bool
    rules: list[str]


def argument_rules(name: str, parameters: str, after_value: str, write: Write) -> dict[str, ArgumentRules]:
    """Rules by the names of the arguments that a schema lists; their own begin with `name`. Raises InvalidRequest."""
    root = json.loads(parameters)
    if odd := [key for key in (*ALTERNATIVES, *_NO_LIST) if key in root]:
        raise InvalidRequest("constraint", f"must have no {odd[0]} beside its type, as this model names each argument")
    required, properties = root.get("required", []), dict(root.get("properties", {}))
    properties |= {key: {} for key in required if key not in properties}
    return {
        key: ArgumentRules(rule, key in required, value_rules(rule, schema, root, after_value, write))
        for index, (key, schema) in enumerate(properties.items())
        for rule in [f"{name}_{index}"]
    }


def value_rules(name: str, schema: object, root: Schema, after_value: str, write: Write) -> list[str]:
    """The rule of this name and those that it needs, of a value of a schema, a part of `root`, and the text after it.

    Raises InvalidRequest if the schema says what such rules cannot.
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
    """A terminal of texts of a schema without the tag that would end them."""
    if odd := [key for key in (*ALTERNATIVES, "enum") if key in schema]:  # an enum that allows nothing
        raise InvalidRequest("constraint", f"must have no such {odd[0]} of an argument that may be a text")
    terms = [f"/(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"]
    if pattern := schema.get("pattern"):
        terms.append(_found(pattern))
    end = re.escape(tag).replace("/", "\\/")
    return " & ".join([*terms, f"~/{_ANY}{end}{_ANY}/"])


def _found(pattern: str) -> str:
    """A terminal of texts in which a pattern is found; its anchors match nothing but the ends of the text."""
    parts = {}  # by the pattern in them, as the later of two with the same one allow more
    for before, begin in (("", "^"), (_ANY, _NEVER)):
        for after, end in (("", "$"), (_ANY, _NEVER)):
            inner = _anchored(pattern, begin, end)
            parts[inner] = f"/{before}({inner}){after}/"
    return f"({' | '.join(parts.values())})"


def _anchored(pattern: str, begin: str, end: str) -> str:
    """A pattern with these in place of its anchors, as llguidance's Lark spells it."""
    written, depth = "", 0  # of classes of characters
    for part in re.findall(r"\\.|\[\^?\]?|.", pattern, re.DOTALL):
        depth += part.startswith("[") - (part == "]" and depth > 0)
        if depth == 0:
            part = {"^": begin, r"\A": begin, "$": end, r"\z": end}.get(part, part)
        written += {"/": r"\/", "\n": r"\n"}.get(part, part)
    return written
