"""A family of models' format of tool calls: how it writes calls, and the grammar of that."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from bough.errors import InvalidRequest
from bough.grammar.grammar import either, grammar_of
from bough.protocol.generation import Constraint, Function, Tools
from bough.tokenization.tokenizer import AddedTokens
from orchestrator.tools.call_parser import CallParser, CallSpelling, CallSyntax, Write, written


@dataclass(frozen=True, slots=True)
class CallRules:
    """The forms of outputs, as right-hand sides of rules in llguidance's dialect of Lark.

    They may refer to `call`, `mark` and `end`. Forms with text may also refer to `free`, text without marks, and to
    `opened`, such text up to and including a mark.
    """

    one: str
    several: str  # one call or more
    free_or_one: str  # text, or one call
    free_and_several: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models calls tools."""

    name: str
    spelling: CallSpelling
    syntax: CallSyntax
    rules: CallRules
    signs: tuple[
        str, str
    ]  # regular expressions: one that its templates contain, and one that only other formats' templates do
    id_prefix: str = "call_"
    id_length: int = 24  # letters and digits after the prefix

    def shown(self, added_tokens: AddedTokens) -> dict[int, str]:
        """The special tokens that the parser must see, though decoding drops them."""
        texts = self.spelling.mark, self.spelling.end, *self.syntax.texts
        return {added_tokens[t].token_id: t for t in texts if t in added_tokens and added_tokens[t].is_special}

    def parser(self, tools: Tools) -> CallParser:
        """A parser of one output."""
        names = [function.name for function in tools.functions]
        return CallParser(self.spelling, names, lambda: self.syntax.reader(tools.functions))

    def grammar(
        self, functions: Mapping[int, Function], tools: Tools, added_tokens: AddedTokens, otherwise: str = ""
    ) -> str:
        """The grammar of an output with calls of these functions, numbered as in the request.

        `otherwise` is the grammar of an output without calls; empty allows any text. If calls are optional, only
        strict functions are held to their schema; others accept any object.
        Raises InvalidRequest naming the function whose schema cannot be followed.
        """
        rules, write = self.rules, partial(written, added_tokens=added_tokens)
        is_alone = tools.must_call or bool(otherwise)  # no text around calls
        if tools.allows_several:
            start = rules.several if is_alone else rules.free_and_several
        else:
            start = rules.one if is_alone else rules.free_or_one
        lines = [f"start: {start}", *self._calls(functions, tools, write), f"mark: {write(self.spelling.mark)}"]
        lines += [f"end: {write(self.spelling.end)}"] if self.spelling.end else []
        lines += [] if is_alone else self._free(added_tokens)
        calls = checked("chat.tools", lines)
        return either(calls, otherwise) if otherwise and not tools.must_call else calls

    def _calls(self, functions: Mapping[int, Function], tools: Tools, write: Write) -> Iterator[str]:
        yield "call: " + " | ".join(f"call_{index}" for index in functions)
        for index, function in functions.items():
            follows_schema = tools.must_call or function.is_strict
            try:
                if follows_schema:
                    grammar_of(Constraint(json_schema=function.parameters))
                yield from self.syntax.rules(f"call_{index}", function, write, follows_schema=follows_schema)
            except InvalidRequest as exc:
                raise exc.named(f"chat.tools[{index}].function.parameters") from exc

    def _free(self, added_tokens: AddedTokens) -> list[str]:
        """Rules of text without a mark. Special tokens cannot be part of regular expressions."""
        mark, end = self.spelling.mark, self.spelling.end
        others = sorted(token.token_id for text, token in added_tokens.items() if text not in (mark, end))
        tokens = f" | <[{ranges(others)}]>" if others else ""
        return [
            f"free: (TEXT{tokens})*",
            "TEXT: /(.|\\n)+/",
            "ANY: /(.|\\n)*/",
            "opened: spelled | free mark" if mark in added_tokens else "opened: spelled",
            f"spelled[lazy]: ANY {json.dumps(mark)}",
        ]


def checked(field: str, rules: Sequence[str]) -> str:
    """The grammar of these rules. Raises InvalidRequest, naming the field, if it cannot be followed."""
    try:
        return grammar_of(Constraint(lark="\n".join(rules)))
    except InvalidRequest as exc:
        raise exc.named(field) from exc


def ranges(numbers: list[int]) -> str:
    """Sorted numbers as the ranges of `<[...]>`: 1-3,7-7."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" for run in runs)
