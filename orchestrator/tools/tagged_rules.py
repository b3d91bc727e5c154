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


class ArgumentRules(NamedTuple):
    """The rules of an argument's value and the text after it, the first of which has this name."""

    name: str
    is_required: bool
    rules: list[str]


def argument_rules(name: str, parameters: str, after_value: str, write: Write) -> dict[str, ArgumentRules]:
    """Rules by the names of the arguments that a schema lists; their own begin with `name`.

    Raises:
        InvalidRequest: the schema says what such rules cannot.
    """
    root = json.loads(parameters)
    if odd := [key for key in (*ALTERNATIVES, *_NO_LIST) if key in root]:
        raise InvalidRequest(f"constraint: must have no {odd[0]} beside its type, as this model names each argument")
    required, properties = root.get("required", []), dict(root.get("properties", {}))
    properties |= {key: {} for key in required if key not in properties}
    return {
        key: ArgumentRules(rule, key in required, value_rules(rule, schema, root, after_value, write))
        for index, (key, schema) in enumerate(properties.items())
        for rule in [f"{name}_{index}"]
    }


def value_rules(name: str, schema: object, root: Schema, after_value: str, write: Write) -> list[str]:
    """The rule of this name and those that it needs, of a value of a schema, a part of `root`, and the text after it.

    Raises:
        InvalidRequest: the schema says what such rules cannot.
    """
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    closing = after_value.rstrip()
    options, rules = list[str](), list[str]()
    for index, branch in enumerate(branches(schema, root)):
        part, types = f"{name}_{index}", types_of(branch)
        if types and types != TEXT:
            options.append(f"{part} {write(after_value)}")
            rules.append(f"{part}: %json {embedded_schema(json.dumps(branch | shared))}")
        elif types and "enum" in branch:
            options += [write(f"{text}{after_value}") for text in branch["enum"]]
        else:
            terminal, after = part.upper(), write(after_value.removeprefix(closing))
            options.append(f"{part} {after}")
            options += [f"{terminal} {token} {after}"] if (token := write(closing)) != json.dumps(closing) else []
            rules += [f"{terminal}: {_text(branch, closing)}", f"{part}[lazy]: {terminal} {json.dumps(closing)}"]
    return [f"{name}: {' | '.join(options)}", *rules]


def _text(schema: Schema, closing: str) -> str:
    """A terminal of texts of a schema in which there is nothing that would end them."""
    if odd := [key for key in (*ALTERNATIVES, "enum") if key in schema]:  # an enum that allows nothing
        raise InvalidRequest(f"constraint: must have no such {odd[0]} of an argument that may be a text")
    terms = [f"/(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"]
    if pattern := schema.get("pattern"):
        before = "" if pattern.startswith("^") else "(.|\\n)*"
        after = "" if re.search(r"(?<!\\)\$$", pattern) else "(.|\\n)*"
        inner = pattern.removeprefix("^").removesuffix("" if after else "$")
        terms.append("/" + before + re.sub(r"(?<!\\)/", r"\\/", f"({inner})") + after + "/")
    end = re.escape(closing.strip()).replace("/", "\\/")
    return " & ".join([*terms, f"~/(.|\\n)*{end}(.|\\n)*/"])
