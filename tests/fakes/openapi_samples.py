"""Bodies that the document at /openapi.json allows, for tests of whether they are accepted."""

from __future__ import annotations

from typing import Any

import jsonschema
from hypothesis import strategies as st

from tests.fakes.openapi_narrowed import Schema

MOST = 3  # entries of a list; optional fields of an object
MAX_TEXT = 12
REFERENCE = "#/components/schemas/"


def samples(schema: Schema, components: Schema) -> st.SearchStrategy[Any]:
    """Values that a schema allows; `components` are those of its document."""
    match schema:
        case {"$ref": str(reference)}:
            return st.deferred(lambda: samples(components["schemas"][reference.removeprefix(REFERENCE)], components))
        case {"const": value}:
            return st.just(value)
        case {"enum": list(values)}:
            return st.sampled_from(values)
        case {"type": "object"}:
            return _objects(schema, components)
        case {"anyOf": list(choices)}:
            return st.one_of(*(samples(choice, components) for choice in choices))
        case {"type": "array"}:
            items = samples(schema.get("items", {}), components)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=min(MOST, schema.get("maxItems", MOST)))
        case {"type": "string", "pattern": str(pattern)}:
            return st.from_regex(pattern, fullmatch=True, alphabet=st.characters(max_codepoint=127))
        case {"type": "string"}:
            most = min(MAX_TEXT, schema.get("maxLength", MAX_TEXT))
            return st.text(st.characters(codec="utf-8"), min_size=schema.get("minLength", 0), max_size=most)
        case {"type": "integer"}:
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case {"type": "number"}:
            least, is_open = schema.get("minimum", schema.get("exclusiveMinimum")), "exclusiveMinimum" in schema
            numbers = st.floats(
                least, schema.get("maximum"), exclude_min=is_open, allow_nan=False, allow_infinity=False
            )
            return numbers.filter(_validator(schema, components).is_valid)
        case {"type": "boolean"}:
            return st.booleans()
        case {"type": "null"}:
            return st.none()
    return st.none() | st.booleans() | st.text(max_size=MAX_TEXT)


def _objects(schema: Schema, components: Schema) -> st.SearchStrategy[Any]:
    """Objects with some of their fields: those of one of several forms, if there are some."""
    validator = _validator(schema, components)

    @st.composite
    def drawn(draw: st.DrawFn) -> Any:
        form = draw(st.sampled_from(schema.get("anyOf", [{}])))
        fields: Schema = schema.get("properties", {}) | form.get("properties", {})
        required = [*schema.get("required", ()), *form.get("required", ())]
        optional = draw(st.lists(st.sampled_from([*fields]), max_size=MOST)) if fields else []
        value = {name: draw(samples(fields[name], components)) for name in (*required, *optional)}
        if not fields and schema.get("additionalProperties"):
            names = samples({"type": "string", **schema.get("propertyNames", {})}, components)
            value = draw(st.dictionaries(names, samples(schema["additionalProperties"], components), max_size=MOST))
        return value

    return drawn().filter(validator.is_valid)


def _validator(schema: Schema, components: Schema) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": components})
