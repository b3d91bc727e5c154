"""OpenAI's format of gpt-oss: messages in channels. Messages to `functions.` in channel `commentary` are calls.

    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>

The end of a call ends the output. `orchestrator.reasoning.parser` reads the messages, and rewrites calls for the
parser of this format: `<|call|>name<|message|>{...}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bough.grammar.grammar import ANY_OBJECT, before, embedded_schema
from bough.protocol.generation import Function, Tools
from bough.tokenization.tokenizer import AddedTokens
from orchestrator.tools.call_parser import CallSpelling, Write, written
from orchestrator.tools.named_call import NamedSyntax
from orchestrator.tools.tool_format import CallRules, ToolFormat, checked

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"  # ends of a message, of a call, and of the last message
MARKS = START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN
RECIPIENT = "functions."  # before the name of a function that is called


class HarmonySyntax(NamedSyntax):
    """A call as the parser reads it, and as models write it."""

    @property
    def texts(self) -> Sequence[str]:
        return MARKS

    def rules(self, name: str, function: Function, write: Write, *, follows_schema: bool) -> list[str]:
        """A message to the function, in either order that models write, up to the mark that ends the output."""
        schema = embedded_schema(function.parameters if follows_schema else ANY_OBJECT)
        to = f"to={RECIPIENT}{function.name}"
        first = write(f"{CHANNEL}commentary {to} {CONSTRAIN}json{MESSAGE}")
        second = f"{write(f' {to}{CHANNEL}commentary ')} ({write(CONSTRAIN)})? {write(f'json{MESSAGE}')}"
        return [f"{name}: ({first} | {second}) {name}_args", f"{name}_args: %json {schema}"]


@dataclass(frozen=True, slots=True)
class HarmonyFormat(ToolFormat):
    """A format whose outputs are whole messages: reasoning and text before a call, and the call or an answer."""

    def grammar(
        self, functions: Mapping[int, Function], tools: Tools, added_tokens: AddedTokens, otherwise: str = ""
    ) -> str:
        """The grammar of an output of whole messages, with at most one call of these functions, or `otherwise`."""
        calls = [*self._calls(functions, tools, partial(written, added_tokens=added_tokens))]
        last = self.rules.one if tools.must_call else self.rules.free_or_one
        return messages_grammar("chat.tools", last, calls, "" if tools.must_call else otherwise, added_tokens)


def messages_grammar(field: str, last: str, calls: Sequence[str], answer: str, added_tokens: AddedTokens) -> str:
    """The grammar of an output whose last message is `last`, "answer" or "call", for which `calls` has the rules.

    `answer` is the grammar of the text in the channel `final`, the only content then; without it text is free. Raises
    InvalidRequest if `field` demands what cannot be followed.
    """
    write = partial(written, added_tokens=added_tokens)
    kinds = '"analysis"' if answer else '("analysis" | "commentary")'
    rules = [
        "start: earlier* last",
        f"last: {last}",
        f"earlier: {write(CHANNEL)} {kinds} {write(MESSAGE)} TEXT? {write(f'{END}{START}assistant')}",
        "TEXT: /(.|\\n)+/",
        *calls,
    ]
    final = f"answer: {write(f'{CHANNEL}final{MESSAGE}')}"
    grammar = checked(field, [*rules, f"{final} TEXT?"])
    return before(field, "\n".join([*rules, f"{final} @answer"]), answer) if answer else grammar


HARMONY = HarmonyFormat(
    name="openai",
    spelling=CallSpelling(mark=CALL),
    syntax=HarmonySyntax(after_name=MESSAGE),
    rules=CallRules("call", "call", "call | answer", "call | answer"),
    signs=(r"<\|channel\|>commentary", r"<tool_call>"),
)
