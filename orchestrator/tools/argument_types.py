"""What a JSON Schema tells of an argument that is written between tags: texts as they are, other values as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, NoReturn

Schema = dict[str, Any]

TEXT = frozenset({"string"})
ALTERNATIVES = ("$ref", "allOf", "anyOf", "oneOf")
_IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array"}  # where no type is given
_TYPES = {
    bool: "boolean", type(None): "null", int: "number", float: "number", str: "string", list: "array", dict: "object"
}  # fmt: skip
_AS_PYTHON_WRITES = {"True": "true", "False": "false", "None": "null"}  # as some templates do
_MAX_DEPTH = 8  # of references and alternatives in one another
_MAX_BRANCHES = 64


def argument_types(parameters: Schema, key: str) -> frozenset[str] | None:
    """The types of JSON that an argument may have, None if the schema does not tell; integers are numbers."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    types = [types_of(branch) for branch in branches(schema, parameters)]
    return frozenset[str]().union(*types) if all(types) else None


def json_text(value: str, types: frozenset[str] | None) -> str:
    """The JSON of a value of one of these types, None if they are not known: JSON as it is, if it may be that."""
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
    """Schemas of which a value has one, each of texts alone, of other values alone, or of any type.

    A schema that nobody has checked may be as odd as it likes: then it is one of any type.
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
        # An empty enum is a branch too: else many of them would be searched in vain for the first.
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
    """What one of a schema's references or alternatives stands for, each with what stands beside it."""
    for key in ALTERNATIVES:
        given = schema.get(key)
        listed = [_referred(given, root)] if key == "$ref" else given if isinstance(given, list) else []
        within = [one for one in listed if isinstance(one, dict)]
        if within and len(within) == len(listed) and (len(within) == 1 or key in ("anyOf", "oneOf")):
            beside = {name: value for name, value in schema.items() if name != key}
            return [beside | one for one in within]
    return []


def _referred(reference: object, root: Schema) -> object:
    """What a reference within the schema refers to; None if that is nothing."""
    found: object = root
    for part in str(reference).removeprefix("#/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and Infinity are no JSON
