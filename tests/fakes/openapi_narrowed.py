"""The document at /openapi.json without the values of which it cannot say whether they are accepted."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

GRAMMARS = ['root ::= "a"', None]
REGEXES = ["a+", None]
SCHEMAS = [{"type": "object"}, {"type": "integer"}, None]
SAMPLES = {  # of texts in languages, and of schemas, which are compiled
    "ebnf": GRAMMARS, "guided_grammar": GRAMMARS, "grammar": GRAMMARS, "guided_regex": REGEXES, "regex": REGEXES,
    "guided_json": SCHEMAS, "json": SCHEMAS, "schema": SCHEMAS, "parameters": [{}, None], "arguments": ["{}", ""],
    "min_tokens": [0, None],  # at most max_tokens
    "request_id": [None],  # one that runs is refused
}  # fmt: skip
NUM_TOKENS, NUM_NODES = 200, 16  # that any served model has


def narrow(document: Schema) -> None:
    """Replace schemas of what depends on other values, or on the served model, by narrower ones."""
    for schema in document["components"]["schemas"].values():
        fields: Schema = schema.get("properties", {}) if schema.get("additionalProperties") else {}  # of requests
        for name in fields.keys() & SAMPLES.keys():
            fields[name] = {"enum": SAMPLES[name]}
        if "tool_choice" in fields and "tools" in fields:  # a function must be one of the tools, of different names
            fields["tool_choice"] = {"enum": ["none", "auto", "required", None]}
        if "tools" in fields:
            fields["tools"]["anyOf"][0]["maxItems"] = 1
        if "logit_bias" in fields:
            fields["logit_bias"]["anyOf"][0]["propertyNames"] = {"pattern": "^[1-9][0-9]$"}
        for name, most in (("stop_token_ids", NUM_TOKENS), ("tokens", NUM_TOKENS), ("prompt", NUM_TOKENS)):
            _limit(fields.get(name, {}), most)
        for name in fields.keys() & {"budget", "width", "depth", "lookup", "n"}:
            _limit(fields[name], NUM_NODES)
    variables = document["components"]["schemas"]["TemplateVariable"]
    variables["anyOf"] = [
        each for each in variables["anyOf"] if each["type"] not in ("array", "object")
    ]  # of any depth
    for path in document["paths"].values():
        for operation in path.values():  # a session in a header excludes several choices in the body
            operation["parameters"] = [each for each in operation["parameters"] if each["in"] != "header"]


def _limit(schema: Schema, most: int) -> None:
    """Let integers in a schema be `most` at most."""
    if schema.get("type") == "integer":
        schema["maximum"] = most
    for inner in [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]:
        _limit(inner, most)
