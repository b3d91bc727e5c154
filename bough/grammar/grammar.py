"""Makes a grammar from a request's constraint, and checks it before the request may run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from queue import LifoQueue
from typing import Any

from bough.errors import InvalidRequest
from bough.grammar.grammar_process import GrammarProcess, Refused
from bough.protocol.generation import Constraint
from bough.protocol.sampling_params import MAX_CHOICES, MAX_GRAMMAR

Spacing = Mapping[str, object]  # options of llguidance

# Blanks in JSON, wherever they are allowed: without a limit a model may write blanks until its tokens are used up.
FLEXIBLE: Spacing = {"whitespace_pattern": r"\n?[ \t]{0,32}"}
# Separators of JSON as Python and chat templates write it.
AS_DUMPED: Spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LEAST_NUMBER = -(2**63) + 513  # smaller numbers round to -(2**63), whose sign llguidance changes without end
MAX_PATTERNS = 8  # patterns that a text must match together: the time to read them doubles with each
NUM_PROCESSES = 2  # that read grammars: a slow one must not delay all others
ANY_OBJECT = '{"type": "object"}'
# The salt of the running task's request. A grammar is cached only for requests of one salt, as the time that it takes
# reveals whether it was cached, and so what others have demanded.
CACHE_SALT: ContextVar[str] = ContextVar("cache_salt", default="")

_LARK = re.compile(r"^[ \t]*(%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)  # occurs only in Lark
_PROCESSES: LifoQueue[GrammarProcess] = LifoQueue()  # that are idle
for _process in range(NUM_PROCESSES):
    _PROCESSES.put(GrammarProcess())


def grammar_of(constraint: Constraint) -> str:
    """The grammar for `SamplingParams.grammar`. A complex one takes up to a second to check, once for each salt.

    Raises:
        InvalidRequest: names the field that cannot be used, and why.
    """
    return _checked(constraint, CACHE_SALT.get())


@lru_cache(maxsize=64)  # shared by the choices of a request and an application's requests
def _checked(constraint: Constraint, _cache_salt: str) -> str:
    size = sum(
        len(text or "") for text in (constraint.json_schema, constraint.regex, constraint.lark, *constraint.choices)
    )
    if size > MAX_GRAMMAR:
        raise InvalidRequest("constraint", f"must be at most {MAX_GRAMMAR} characters", size)
    name, grammar = _written(constraint)
    if len(grammar) > MAX_GRAMMAR:
        raise InvalidRequest(f"constraint.{name}", f"must be at most {MAX_GRAMMAR} characters", len(grammar))
    _called(f"constraint.{name}", "must be one that can be followed", "check", grammar=grammar)
    return grammar


def _called(field: str, must: str, operation: str, **fields: object) -> str:
    """The grammar in the answer of a process that reads grammars, if any. Raises InvalidRequest naming the field."""
    process = _PROCESSES.get()
    try:
        return str(process.call(operation, fields=fields)[0].get("grammar", ""))
    except Refused as exc:
        raise InvalidRequest(field, f"{must}: {exc}") from exc
    finally:
        _PROCESSES.put(process)


def _written(constraint: Constraint) -> tuple[str, str]:
    match constraint:
        case Constraint(str(schema), None, (), None):
            return "json_schema", _of_schema(schema)
        case Constraint(None, str(regex), (), None):
            return "regex", _of_regex(_not_empty("regex", regex))
        case Constraint(None, None, (_, *_) as choices, None):
            return "choices", _alternatives(choices)
        case Constraint(None, None, (), str(lark)):
            return "lark", _of_rules(_not_empty("lark", lark))
    names = "json_schema", "regex", "choices", "lark"
    given = " and ".join(name for name in names if getattr(constraint, name) not in (None, ())) or "none"
    raise InvalidRequest("constraint", f"must have exactly one of {', '.join(names)}", given)


def _of_regex(regex: str) -> str:
    return _called("constraint.regex", "must be one that can be followed", "write_regex", regex=regex)


def _of_rules(rules: str) -> str:
    """Rules in Lark; EBNF, as other servers read it, is converted."""
    if "::=" not in rules or _LARK.search(rules):
        return rules
    return _called("constraint.lark", "must be Lark, or EBNF as llama.cpp reads it", "write_lark", rules=rules)


def _of_schema(schema: str, spacing: Spacing = FLEXIBLE) -> str:
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest("constraint.json_schema", "must be JSON", f"{schema[:64]!r}: {exc}") from exc
    if not isinstance(parsed, dict):
        raise InvalidRequest("constraint.json_schema", "must be an object", repr(schema[:64]))
    _require_readable(parsed)
    must = f"must be JSON, got {schema[:64]!r}"
    return _called("constraint.json_schema", must, "write_schema", schema=schema, spacing=spacing)


def _require_readable(schema: object) -> None:
    """Refuse schemas that are known to be too much for llguidance, before they end a process. Raises InvalidRequest."""
    for part in _parts(schema):
        if isinstance(part, int | float) and part < LEAST_NUMBER:
            raise InvalidRequest("constraint.json_schema", f"numbers must be at least {LEAST_NUMBER}", str(part)[:32])
        alternatives = part.get("allOf") if isinstance(part, dict) else None
        conditions = alternatives if isinstance(alternatives, list) else []
        num_patterns = sum(isinstance(condition, dict) and "pattern" in condition for condition in conditions)
        if num_patterns > MAX_PATTERNS:
            raise InvalidRequest(
                "constraint.json_schema", f"allOf must have at most {MAX_PATTERNS} patterns", num_patterns
            )


def _parts(schema: object) -> Iterator[Any]:
    """All values in a schema; without recursion, as it may be as deep as Python's reader allows."""
    waiting = [schema]
    while waiting:
        yield (part := waiting.pop())
        if isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def either(first: str, second: str) -> str:
    """The grammar of outputs that follow one of two grammars.

    Raises:
        InvalidRequest: it is too large.
    """
    start = {"lark_grammar": "start: @first | @second"}
    grammars = [start, _part(first) | {"name": "first"}, _part(second) | {"name": "second"}]
    grammar = json.dumps({"grammars": grammars}, ensure_ascii=False)
    if len(grammar) > MAX_GRAMMAR:
        raise InvalidRequest("constraint", f"must be at most {MAX_GRAMMAR} characters with tools", len(grammar))
    return grammar


def before(field: str, rules: str, answer: str) -> str:
    """The grammar of these rules, in which `@answer` has the grammar `answer`.

    Raises:
        InvalidRequest: it is too large for `field`.
    """
    parts = json.loads(answer) if answer.startswith("{") else {"grammars": [{"lark_grammar": answer}]}
    parts["grammars"][0]["name"] = "answer"
    parts["grammars"].insert(0, {"name": "output", "lark_grammar": rules})
    joined = json.dumps(parts, ensure_ascii=False)
    if len(joined) > MAX_GRAMMAR:
        raise InvalidRequest(field, f"must make a grammar of at most {MAX_GRAMMAR} characters", len(joined))
    return joined


def _part(grammar: str) -> dict[str, object]:
    """A grammar as part of a larger one, in which all JSON is as Python writes it: the lexer does not go back."""
    part: dict[str, object] = {"lark_grammar": grammar}
    if grammar.startswith("{"):
        part = json.loads(grammar)["grammars"][0]
    if isinstance(schema := part.get("json_schema"), dict):
        schema["x-guidance"] = AS_DUMPED
    return part


def embedded_schema(schema: str) -> str:
    """A JSON Schema that `grammar_of` accepts, for `%json` in a rule of Lark; the JSON is as Python writes it."""
    return json.dumps(json.loads(_of_schema(schema, AS_DUMPED))["grammars"][0]["json_schema"], ensure_ascii=False)


def _alternatives(choices: tuple[str, ...]) -> str:
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest("constraint.choices", f"must have at most {MAX_CHOICES} entries", len(choices))
    texts = (_not_empty(f"choices[{index}]", choice) for index, choice in enumerate(choices))
    return "start: " + " | ".join(map(json.dumps, texts))


def _not_empty(name: str, text: str) -> str:
    if not text:
        raise InvalidRequest(f"constraint.{name}", "must be a non-empty text", "''")
    return text
