"""Grammars of outputs that have calls of tools in them, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby

from bough.errors import InvalidRequest
from bough.grammar.grammar import grammar_of
from bough.protocol.generation import Constraint, Function
from bough.tokenization.tokenizer import AddedToken
from orchestrator.tools.call_parser import CallSpelling
from orchestrator.tools.call_syntax import CallSyntax, written


def call_grammar(
    start: str,
    spelling: CallSpelling,
    syntax: CallSyntax,
    functions: Mapping[int, Function],
    must_call: bool,
    is_alone: bool,
    added_tokens: Mapping[str, AddedToken],
) -> str:
    """The grammar that begins with `start`, which may refer to these rules: `call`, an object; `mark` and `end`.

    If calls do not stand alone also to `free`, text with neither, and `opened`, such text up to and with a mark.
    Without `must_call` only functions that are strict have the arguments of their schema, others any object.

    Raises:
        InvalidRequest: names the function whose schema cannot be followed.
    """
    rules = [f"start: {start}", *call_rules(syntax, functions, must_call, added_tokens)]
    rules += [f"mark: {written(spelling.mark, added_tokens)}"]
    rules += [f"end: {written(spelling.end, added_tokens)}"] if spelling.end else []
    if not is_alone:
        rules += _free(spelling, added_tokens)
    return checked("chat.tools", rules)


def call_rules(
    syntax: CallSyntax, functions: Mapping[int, Function], must_call: bool, added_tokens: Mapping[str, AddedToken]
) -> list[str]:
    """The rule `call`, of a call of any of the functions, and those that it needs. Raises as `call_grammar`."""
    rules = ["call: " + " | ".join(f"call_{index}" for index in functions)]
    write = partial(written, added_tokens=added_tokens)
    for index, function in functions.items():
        follows_schema = must_call or function.is_strict
        try:
            if follows_schema:
                grammar_of(Constraint(json_schema=function.parameters))
            rules += syntax.rules(f"call_{index}", function, write, follows_schema=follows_schema)
        except InvalidRequest as exc:
            raise _renamed(exc, f"chat.tools[{index}].function.parameters") from exc
    return rules


def checked(field: str, rules: Sequence[str]) -> str:
    """The grammar of these rules. Raises InvalidRequest, naming the field, if it cannot be followed."""
    try:
        return grammar_of(Constraint(lark="\n".join(rules)))
    except InvalidRequest as exc:
        raise _renamed(exc, field) from exc


def _renamed(exc: InvalidRequest, name: str) -> InvalidRequest:
    """The refusal of a constraint as one of another field."""
    return InvalidRequest(f"{name}: {str(exc).partition(': ')[2]}")


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
