"""What a family of models needs so that it can call tools: how it spells calls, and the grammar of that spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bough.grammar.grammar import either
from bough.protocol.generation import Function, Tools
from bough.tokenization.tokenizer import AddedToken
from orchestrator.tools.call_grammar import call_grammar
from orchestrator.tools.call_parser import CallParser, CallSpelling
from orchestrator.tools.call_syntax import CallSyntax


@dataclass(frozen=True, slots=True)
class CallRules:
    """Right-hand sides of grammar rules, by how many calls there may be. `call_grammar` has the rules they refer to."""

    one: str
    several: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models calls tools."""

    name: str
    spelling: CallSpelling
    syntax: CallSyntax
    demanded: CallRules  # an output that is calls alone
    allowed: CallRules  # an output that is text, with calls or without
    id_prefix: str = "call_"
    id_length: int = 24  # letters and digits after the prefix

    def shown(self, added_tokens: Mapping[str, AddedToken]) -> dict[int, str]:
        """The special tokens that the parser must see, though decoded text has none."""
        texts = self.spelling.mark, self.spelling.end, *self.syntax.texts
        return {added_tokens[t].token_id: t for t in texts if t in added_tokens and added_tokens[t].is_special}

    def parser(self, tools: Tools) -> CallParser:
        """A parser of one output."""
        names = [function.name for function in tools.functions]
        return CallParser(self.spelling, names, lambda: self.syntax.reader(tools.functions))

    def grammar(
        self,
        functions: Mapping[int, Function],
        tools: Tools,
        added_tokens: Mapping[str, AddedToken],
        otherwise: str = "",
    ) -> str:
        """The grammar of an output with calls of these functions, which are numbered as the request's.

        `otherwise` is the grammar of an output without calls, if there may be one; without it that is any text.

        Raises:
            InvalidRequest: names the function whose schema cannot be followed.
        """
        is_alone = tools.must_call or bool(otherwise)  # no text beside calls
        rules = self.demanded if is_alone else self.allowed
        start = rules.several if tools.allows_several else rules.one
        calls = call_grammar(start, self.spelling, self.syntax, functions, tools.must_call, is_alone, added_tokens)
        return either(calls, otherwise) if otherwise and not tools.must_call else calls
