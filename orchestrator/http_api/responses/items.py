"""Items of a response's output, and the events by which a stream tells of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.http_api.fields.errors import Json


class ItemEvent(NamedTuple):
    """An event about an item."""

    kind: str  # without "response."
    fields: Json


class TextKind(NamedTuple):
    """What items whose content is one part of text differ in."""

    prefix: str  # of ids
    item: Json  # fields of the item
    part: Json  # fields of its part, whose type is also the name of the events about its text


MESSAGE = TextKind("msg", {"type": "message", "role": "assistant"}, {"type": "output_text", "annotations": []})
REASONING = TextKind("rs", {"type": "reasoning", "summary": []}, {"type": "reasoning_text"})


@dataclass(slots=True)
class TextItem:
    """A message or thoughts, as far as they have come. Only tokens of messages have log-probabilities in a response."""

    kind: TextKind
    item_id: str
    status: str = "in_progress"
    text: str = ""
    logprobs: list[Json] = field(default_factory=list)

    def told(self) -> Json:
        """The item as JSON."""
        return self._with(self._part())

    def begun(self) -> Iterator[ItemEvent]:
        """The events of a new item and its part."""
        yield ItemEvent("output_item.added", {"item": self._with()})
        yield self._event("content_part.added", {"part": self._part()})

    def added(self, text: str, logprobs: list[Json]) -> ItemEvent:
        """Add a further piece of text, with log-probabilities of its tokens; returns the event of it."""
        self.text += text
        self.logprobs += logprobs
        return self._event(f"{self.kind.part['type']}.delta", {"delta": text} | self._probabilities(logprobs))

    def ended(self, status: str, logprobs: list[Json]) -> Iterator[ItemEvent]:
        """The events of the ends of text, part and item, with log-probabilities that no piece had."""
        self.status = status
        self.logprobs += logprobs
        done = {"text": self.text} | self._probabilities(self.logprobs)
        yield self._event(f"{self.kind.part['type']}.done", done)
        yield self._event("content_part.done", {"part": self._part()})
        yield ItemEvent("output_item.done", {"item": self.told()})

    def _part(self) -> Json:
        return self.kind.part | {"text": self.text} | self._probabilities([*self.logprobs])

    def _probabilities(self, logprobs: list[Json]) -> Json:
        return {"logprobs": logprobs} if self.kind is MESSAGE else {}

    def _with(self, *parts: Json) -> Json:
        return {"id": self.item_id} | self.kind.item | {"status": self.status, "content": [*parts]}

    def _event(self, kind: str, fields: Json) -> ItemEvent:
        return ItemEvent(kind, {"item_id": self.item_id, "content_index": 0} | fields)


@dataclass(slots=True)
class CallItem:
    """A call of a function, whose text is that of the arguments. Its tokens have no log-probabilities in a response."""

    item_id: str
    call_id: str
    name: str
    status: str = "in_progress"
    text: str = ""

    def told(self) -> Json:
        told: Json = {"id": self.item_id, "type": "function_call", "status": self.status}
        return told | {"call_id": self.call_id, "name": self.name, "arguments": self.text}

    def begun(self) -> Iterator[ItemEvent]:
        """The event of a new call."""
        yield ItemEvent("output_item.added", {"item": self.told()})

    def added(self, text: str, _: list[Json]) -> ItemEvent:
        """Add a further piece of the arguments; returns the event of it."""
        self.text += text
        return ItemEvent("function_call_arguments.delta", {"item_id": self.item_id, "delta": text})

    def ended(self, status: str, _: list[Json]) -> Iterator[ItemEvent]:
        """The events of the ends of arguments and call."""
        self.status = status
        done: Json = {"item_id": self.item_id, "name": self.name, "arguments": self.text}
        yield ItemEvent("function_call_arguments.done", done)
        yield ItemEvent("output_item.done", {"item": self.told()})


Item = TextItem | CallItem
