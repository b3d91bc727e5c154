"""Calls of tools in the answer to a conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.http_api.errors import Json
from orchestrator.tools.call_parser import CallParser, ContentText, Piece
from orchestrator.tools.call_reader import ArgumentsText, CallBegun
from orchestrator.tools.tool_format import ToolFormat


@dataclass(slots=True)
class _Call:
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
    _calls: list[_Call] = field(default_factory=list)

    def deltas(self, text: str, *, is_end: bool = False) -> Iterator[Json]:
        """What a further piece of the text, or the last, adds to a streamed message."""
        pieces = self.parser.push(text)
        for piece in (*pieces, *self.parser.finish()) if is_end else pieces:
            yield self._delta(piece)

    @property
    def is_whole(self) -> bool:
        """Whether there are calls, the last of which is complete."""
        return bool(self._calls) and not self.parser.is_in_call

    def message(self) -> Json:
        """Content and calls as fields of a whole message."""
        if not self._calls:
            return {"content": self.content}
        calls = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self._calls
        ]
        return {"content": self.content or None, "tool_calls": calls}

    def _delta(self, piece: Piece) -> Json:
        match piece:
            case ContentText(text):
                self.content += text
                return {"content": text}
            case CallBegun(name):
                call = _Call(self._call_id(), name)
                self._calls.append(call)
                begun: Json = {"id": call.call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                return {"tool_calls": [{"index": len(self._calls) - 1} | begun]}
            case ArgumentsText(text):
                self._calls[-1].arguments += text
                return {"tool_calls": [{"index": len(self._calls) - 1, "function": {"arguments": text}}]}

    def _call_id(self) -> str:
        digest = hashlib.blake2b(f"{self.choice_id}/{len(self._calls)}".encode()).hexdigest()
        return self.known.id_prefix + digest[: self.known.id_length]
