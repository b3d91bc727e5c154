"""Items of a response's output, and the events by which a stream tells of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from orchestrator.http_api.errors import Json


class ItemEvent(NamedTuple):
    """An event about an item."""

    kind: str  # without "response."
    fields: Json


@dataclass(slots=True)
class Item(ABC):
    """An item as far as it has come."""

    item_id: str
    status: str = "in_progress"
    text: str = ""

    prefix: ClassVar[str]  # of ids

    @property
    def is_open(self) -> bool:
        """Whether more may be added."""
        return self.status == "in_progress"

    @abstractmethod
    def told(self) -> Json:
        """The item as JSON."""

    @abstractmethod
    def begun(self) -> Iterator[ItemEvent]:
        """The events of a new item."""

    @abstractmethod
    def added(self, text: str, logprobs: list[Json]) -> ItemEvent:
        """Add a further piece of text, with log-probabilities of its tokens; returns the event of it."""

    @abstractmethod
    def ended(self, status: str, logprobs: list[Json]) -> Iterator[ItemEvent]:
        """The events of its end, with log-probabilities that no piece had."""


@dataclass(slots=True)
class MessageItem(Item):
    """A message, whose content is one part."""

    logprobs: list[Json] = field(default_factory=list)

    prefix = "msg"

    def told(self) -> Json:
        """The message as JSON."""
        return self._with(self._part())

    def begun(self) -> Iterator[ItemEvent]:
        """The events of a new message and its part."""
        yield ItemEvent("output_item.added", {"item": self._with()})
        yield self._event("content_part.added", part=self._part())

    def added(self, text: str, logprobs: list[Json]) -> ItemEvent:
        """Add a further piece; returns the event of it."""
        self.text += text
        self.logprobs += logprobs
        return self._event("output_text.delta", delta=text, logprobs=logprobs)

    def ended(self, status: str, logprobs: list[Json]) -> Iterator[ItemEvent]:
        """The events of the ends of text, part and message."""
        self.status = status
        self.logprobs += logprobs
        yield self._event("output_text.done", text=self.text, logprobs=self.logprobs)
        yield self._event("content_part.done", part=self._part())
        yield ItemEvent("output_item.done", {"item": self.told()})

    def _part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": [*self.logprobs]}

    def _with(self, *parts: Json) -> Json:
        told: Json = {"id": self.item_id, "type": "message", "status": self.status, "role": "assistant"}
        return told | {"content": [*parts]}

    def _event(self, kind: str, **fields: object) -> ItemEvent:
        return ItemEvent(kind, {"item_id": self.item_id, "content_index": 0} | fields)


@dataclass(slots=True)
class ReasoningItem(Item):
    """Thoughts, whose content is one part. Their tokens have no log-probabilities in a response."""

    prefix = "rs"

    def told(self) -> Json:
        """The thoughts as JSON."""
        return self._with(self._part())

    def begun(self) -> Iterator[ItemEvent]:
        """The events of new thoughts and their part."""
        yield ItemEvent("output_item.added", {"item": self._with()})
        yield self._event("content_part.added", part=self._part())

    def added(self, text: str, _: list[Json]) -> ItemEvent:
        """Add a further piece; returns the event of it."""
        self.text += text
        return self._event("reasoning_text.delta", delta=text)

    def ended(self, status: str, _: list[Json]) -> Iterator[ItemEvent]:
        """The events of the ends of text, part and thoughts."""
        self.status = status
        yield self._event("reasoning_text.done", text=self.text)
        yield self._event("content_part.done", part=self._part())
        yield ItemEvent("output_item.done", {"item": self.told()})

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def _with(self, *parts: Json) -> Json:
        told: Json = {"id": self.item_id, "type": "reasoning", "status": self.status, "summary": []}
        return told | {"content": [*parts]}

    def _event(self, kind: str, **fields: object) -> ItemEvent:
        return ItemEvent(kind, {"item_id": self.item_id, "content_index": 0} | fields)


@dataclass(slots=True)
class CallItem(Item):
    """A call of a function, whose text is that of the arguments. Its tokens have no log-probabilities in a response."""

    call_id: str = ""
    name: str = ""

    prefix = "fc"

    def told(self) -> Json:
        """The call as JSON."""
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
