"""From what a request demands of its output to a grammar, which is checked before the request may run."""

from __future__ import annotations

import json
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from bough.concurrency.deep_stack import on_deep_stack
from bough.errors import InvalidRequest
from bough.grammar.allowed_tokens import LIMITS, in_one_line
from bough.protocol.generation import Constraint
from bough.protocol.sampling_params import MAX_CHOICES, MAX_GRAMMAR

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # of types only

# Blanks in JSON, wherever they may stand: without a limit a model may go on with them until its tokens are used up.
FLEXIBLE: JsonCompileOptions = {"whitespace_pattern": r"\n?[ \t]{0,32}"}
# As Python and chat templates write JSON.
AS_DUMPED: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT = '{"type": "object"}'
# The salt of the request that the running task works for. How long a grammar takes tells whether it was kept, and so
# what others have demanded: it is kept for requests of one salt.
CACHE_SALT: ContextVar[str] = ContextVar("cache_salt", default="")


def grammar_of(constraint: Constraint) -> str:
    """The grammar, for `SamplingParams.grammar`. A complex one takes up to a second to check, once for each salt.

    Raises:
        InvalidRequest: names the field that cannot be used, and why.
    """
    return _checked(constraint, CACHE_SALT.get())


@lru_cache(maxsize=64)  # of the choices of one request, and of those of an application
def _checked(constraint: Constraint, _cache_salt: str) -> str:
    size = sum(
        len(text or "") for text in (constraint.json_schema, constraint.regex, constraint.lark, *constraint.choices)
    )
    if size > MAX_GRAMMAR:
        raise InvalidRequest(f"constraint: must be at most {MAX_GRAMMAR} characters, got {size}")
    name, grammar = _written(constraint)
    if len(grammar) > MAX_GRAMMAR:
        raise InvalidRequest(f"constraint.{name}: must be at most {MAX_GRAMMAR} characters, got {len(grammar)}")
    # llguidance recurses along rules that name one another, and ends the process where the stack ends
    is_error, messages = on_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS))
    if is_error:
        raise InvalidRequest(f"constraint.{name}: must be one that can be followed: {in_one_line(messages[0])}")
    return grammar


def _written(constraint: Constraint) -> tuple[str, str]:
    match constraint:
        case Constraint(str(schema), None, (), None):
            return "json_schema", _of_schema(schema)
        case Constraint(None, str(regex), (), None):
            return "regex", LLMatcher.grammar_from_regex(_not_empty("regex", regex))
        case Constraint(None, None, (_, *_) as choices, None):
            return "choices", LLMatcher.grammar_from_lark(_alternatives(choices))
        case Constraint(None, None, (), str(lark)):
            return "lark", LLMatcher.grammar_from_lark(_not_empty("lark", lark))
    names = "json_schema", "regex", "choices", "lark"
    given = " and ".join(name for name in names if getattr(constraint, name) not in (None, ())) or "none"
    raise InvalidRequest(f"constraint: must have exactly one of {', '.join(names)}, got {given}")


def _of_schema(schema: str, spacing: JsonCompileOptions = FLEXIBLE) -> str:
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"constraint.json_schema: must be JSON, got {schema[:64]!r}: {exc}") from exc
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"constraint.json_schema: must be an object, got {schema[:64]!r}")
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=spacing)
    except ValueError as exc:  # numbers, depths and characters that Python's reader lets through
        raise InvalidRequest(
            f"constraint.json_schema: must be JSON, got {schema[:64]!r}: {in_one_line(str(exc))}"
        ) from exc


def either(first: str, second: str) -> str:
    """The grammar of outputs that follow one of two grammars.

    Raises:
        InvalidRequest: it is too large.
    """
    start = {"lark_grammar": "start: @first | @second"}
    grammars = [start, _part(first) | {"name": "first"}, _part(second) | {"name": "second"}]
    grammar = json.dumps({"grammars": grammars}, ensure_ascii=False)
    if len(grammar) > MAX_GRAMMAR:
        raise InvalidRequest(f"constraint: must be at most {MAX_GRAMMAR} characters with tools, got {len(grammar)}")
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
        raise InvalidRequest(f"{field}: must make a grammar of at most {MAX_GRAMMAR} characters, got {len(joined)}")
    return joined


def _part(grammar: str) -> dict[str, object]:
    """A grammar as part of one of several, in all of which JSON is as Python writes it: the lexer does not go back."""
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
        raise InvalidRequest(f"constraint.choices: must have at most {MAX_CHOICES} entries, got {len(choices)}")
    texts = (_not_empty(f"choices[{index}]", choice) for index, choice in enumerate(choices))
    return "start: " + " | ".join(map(json.dumps, texts))


def _not_empty(name: str, text: str) -> str:
    if not text:
        raise InvalidRequest(f"constraint.{name}: must be a non-empty text, got ''")
    return text
