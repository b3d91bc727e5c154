"""Grammars of outputs that have calls of tools in them, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby

from bough.errors import InvalidRequest
from bough.grammar.grammar import ANY_OBJECT, embedded_schema, grammar_of
from bough.protocol.generation import Constraint, Function
from bough.tokenization.tokenizer import AddedToken
from orchestrator.tools.call_parser import CallSpelling


def call_grammar(
    start: str,
    spelling: CallSpelling,
    arguments_key: str,
    functions: Mapping[int, Function],
    must_call: bool,
    added_tokens: Mapping[str, AddedToken],
) -> str:
    """The grammar that begins with `start`, which may refer to these rules: `call`, an object; `mark` and `end`.

    Without `must_call` also to `free`, text with neither, and `opened`, such text up to and with a mark; and only
    functions that are strict have the arguments of their schema, others any object.

    Raises:
        InvalidRequest: names the function whose schema cannot be followed.
    """
    rules = [f"start: {start}", "call: " + " | ".join(f"call_{index}" for index in functions)]
    for index, function in functions.items():
        is_free = not must_call and not function.is_strict
        head = json.dumps(f'{{"name": {json.dumps(function.name)}, "{arguments_key}": ')
        schema = embedded_schema(ANY_OBJECT) if is_free else _schema(index, function)
        rules += [f'call_{index}: {head} args_{index} "}}"', f"args_{index}: %json {schema}"]
    rules += [f"mark: {token_or_text(spelling.mark, added_tokens)}"]
    rules += [f"end: {token_or_text(spelling.end, added_tokens)}"] if spelling.end else []
    if not must_call:
        rules += _free(spelling, added_tokens)
    try:
        return grammar_of(Constraint(lark="\n".join(rules)))
    except InvalidRequest as exc:
        raise _renamed(exc, "chat.tools") from exc


def _schema(index: int, function: Function) -> str:
    """The schema of a function's arguments, for a rule."""
    name = f"chat.tools[{index}].function.parameters"
    try:
        grammar_of(Constraint(json_schema=function.parameters))
    except InvalidRequest as exc:
        raise _renamed(exc, name) from exc
    return embedded_schema(function.parameters)


def _renamed(exc: InvalidRequest, name: str) -> InvalidRequest:
    """The refusal of a constraint as one of another field."""
    return InvalidRequest(f"{name}: {str(exc).partition(': ')[2]}")


def token_or_text(text: str, added_tokens: Mapping[str, AddedToken]) -> str:
    """The one token of a text where the vocabulary has one: models were trained with it."""
    token = added_tokens.get(text)
    return json.dumps(text) if token is None else f"<[{token.token_id}]>"


def _free(spelling: CallSpelling, added_tokens: Mapping[str, AddedToken]) -> list[str]:
    """Rules of text without a mark. Tokens of whole texts are no part of regular expressions."""
    others = sorted(token.token_id for text, token in added_tokens.items() if text not in (spelling.mark, spelling.end))
    tokens = f" | <[{ranges(others)}]>" if others else ""
    opened = "spelled | free mark" if spelling.mark in added_tokens else "spelled"
    return [
        f"free: (TEXT{tokens})*",
        "TEXT: /(.|\\n)+/",
        "ANY: /(.|\\n)*/",
        f"opened: {opened}",
        f"spelled[lazy]: ANY {json.dumps(spelling.mark)}",
    ]


def ranges(numbers: list[int]) -> str:
    """Sorted numbers as the ranges of `<[...]>`: 1-3,7-7."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" for run in runs)
