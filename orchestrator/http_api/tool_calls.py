"""Calls of tools in the answer to a conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bough.protocol.generation import ToolChoice, Tools
from orchestrator.http_api.errors import Json
from orchestrator.tools.call_parser import CallParser, ContentText, Piece
from orchestrator.tools.call_reader import ArgumentsText, CallBegun
from orchestrator.tools.tool_format import ToolFormat

Formats = Callable[[str], ToolFormat]  # takes a model's name


@dataclass(slots=True)
class Call:
    """A call of a function, as far as it has come."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChoiceCalls:
    """The content and the calls of one choice, from its text."""

    parser: CallParser
    known: ToolFormat
    choice_id: str  # from which ids of calls are made
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def pieces(self, text: str, *, is_end: bool = False) -> Iterator[Piece]:
        """What a further piece of the text, or the last, adds to the content or to the calls."""
        pieces = self.parser.push(text)
        for piece in (*pieces, *self.parser.finish()) if is_end else pieces:
            self._note(piece)
            yield piece

    def deltas(self, text: str, *, is_end: bool = False) -> Iterator[Json]:
        """The same as fields of a streamed message."""
        return map(self._delta, self.pieces(text, is_end=is_end))

    @property
    def is_whole(self) -> bool:
        """Whether there are calls, the last of which is complete."""
        return bool(self.calls) and not self.parser.is_in_call

    def message(self) -> Json:
        """Content and calls as fields of a whole message."""
        if not self.calls:
            return {"content": self.content}
        calls = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        return {"content": self.content or None, "tool_calls": calls}

    def _note(self, piece: Piece) -> None:
        match piece:
            case ContentText(text):
                self.content += text
            case CallBegun(name):
                self.calls.append(Call(self._call_id(), name))
            case ArgumentsText(text):
                self.calls[-1].arguments += text

    def _delta(self, piece: Piece) -> Json:
        index = len(self.calls) - 1
        match piece:
            case ContentText(text):
                return {"content": text}
            case CallBegun(name):
                begun: Json = {"id": self.calls[-1].call_id, "type": "function"}
                return {"tool_calls": [{"index": index} | begun | {"function": {"name": name, "arguments": ""}}]}
            case ArgumentsText(text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call_id(self) -> str:
        digest = hashlib.blake2b(f"{self.choice_id}/{len(self.calls)}".encode()).hexdigest()
        return self.known.id_prefix + digest[: self.known.id_length]


def calls_in(choice_id: str, tools: Tools | None, formats: Formats, model: str) -> ChoiceCalls | None:
    """The calls that a choice of this model may have; None if none are looked for, as without tools.

    A request that was aborted before its model was known has none.
    """
    if tools is None or tools.choice is ToolChoice.NONE or not model:
        return None
    known = formats(model)
    return ChoiceCalls(known.parser(tools), known, choice_id)
