"""/v1/responses: from events to the typed events of a stream, and to whole responses."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

from bough.protocol.generation import Event, Finished, Function, Started, Tokens, Tools
from orchestrator.http_api.answers.answer import (
    Answer,
    AnswerContent,
    Formats,
    Head,
    ReasoningText,
    Spell,
    chat_logprobs,
)
from orchestrator.http_api.fields.errors import CONTEXT_EXCEEDED, ApiError, Json
from orchestrator.http_api.responses.fields import ResponseFields, TextFormatFields
from orchestrator.tools.call_parser import ArgumentsText, CallBegun, ContentText

STATUSES = {None: "in_progress", "stop": "completed", "length": "incomplete", "abort": "cancelled"}
_LAST_EVENTS = {"cancelled": "failed"}  # by status, if the names differ: OpenAI has no event for cancelled responses
_CODES = {HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_exceeded", HTTPStatus.BAD_REQUEST: "invalid_prompt"}


class ItemEvent(NamedTuple):
    """An event about an item."""

    kind: str  # without "response."
    fields: Json


class TextKind(NamedTuple):
    """The differences between items with one part of text."""

    prefix: str  # of ids
    item: Json  # fields of the item
    part: Json  # fields of its part, whose type is also the name of the events about its text


MESSAGE = TextKind("msg", {"type": "message", "role": "assistant"}, {"type": "output_text", "annotations": []})
REASONING = TextKind("rs", {"type": "reasoning", "summary": []}, {"type": "reasoning_text"})


@dataclass(slots=True)
class TextItem:
    """A message or reasoning so far. Only tokens of messages have log-probabilities in a response."""

    kind: TextKind
    item_id: str
    status: str = "in_progress"
    text: str = ""
    logprobs: list[Json] = field(default_factory=list)

    def as_json(self) -> Json:
        """The item as JSON."""
        return self._with(self._part())

    def begun(self) -> Iterator[ItemEvent]:
        """The events of a new item and its part."""
        yield ItemEvent("output_item.added", {"item": self._with()})
        yield self._event("content_part.added", {"part": self._part()})

    def added(self, text: str, logprobs: list[Json]) -> ItemEvent:
        """Add a further piece of text, with log-probabilities of its tokens; returns its event."""
        self.text += text
        self.logprobs += logprobs
        return self._event(f"{self.kind.part['type']}.delta", {"delta": text} | self._probabilities(logprobs))

    def ended(self, status: str, logprobs: list[Json]) -> Iterator[ItemEvent]:
        """The events that end text, part and item, with the log-probabilities of no piece."""
        self.status = status
        self.logprobs += logprobs
        done = {"text": self.text} | self._probabilities(self.logprobs)
        yield self._event(f"{self.kind.part['type']}.done", done)
        yield self._event("content_part.done", {"part": self._part()})
        yield ItemEvent("output_item.done", {"item": self.as_json()})

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
    """A call of a function; its text is the arguments. Its tokens have no log-probabilities in a response."""

    item_id: str
    call_id: str
    name: str
    status: str = "in_progress"
    text: str = ""

    def as_json(self) -> Json:
        fields: Json = {"id": self.item_id, "type": "function_call", "status": self.status}
        return fields | {"call_id": self.call_id, "name": self.name, "arguments": self.text}

    def begun(self) -> Iterator[ItemEvent]:
        """The event of a new call."""
        yield ItemEvent("output_item.added", {"item": self.as_json()})

    def added(self, text: str, _: list[Json]) -> ItemEvent:
        """Add a further piece of the arguments; returns its event."""
        self.text += text
        return ItemEvent("function_call_arguments.delta", {"item_id": self.item_id, "delta": text})

    def ended(self, status: str, _: list[Json]) -> Iterator[ItemEvent]:
        """The events that end arguments and call."""
        self.status = status
        done: Json = {"item_id": self.item_id, "name": self.name, "arguments": self.text}
        yield ItemEvent("function_call_arguments.done", done)
        yield ItemEvent("output_item.done", {"item": self.as_json()})


Item = TextItem | CallItem


def repeated(fields: ResponseFields, tools: Tools | None) -> Json:
    """The request's fields that a response repeats."""
    return {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata,
        "model": fields.model,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": fields.reasoning.effort, "summary": None},
        "store": False,
        "text": {"format": _format(fields.text.format)},
        "tool_choice": fields.tool_choice.given,
        "tools": [_function(function) for function in tools.functions] if tools else [],
        "top_logprobs": fields.top_logprobs,
        "truncation": "disabled",
        "user": fields.user,
        **fields.model_dump(include={"temperature", "top_p"}),
    }


def _format(wanted: TextFormatFields) -> Json:
    if wanted.json_schema is None:
        return {"type": wanted.type}
    fields: Json = {"name": wanted.name or "", "description": wanted.description, "strict": wanted.strict}
    return {"type": wanted.type, "schema": json.loads(wanted.json_schema)} | fields


def _function(function: Function) -> Json:
    return {
        "type": "function",
        "name": function.name,
        "description": function.description,
        "parameters": json.loads(function.parameters),
        "strict": function.is_strict,
    }


class ResponseAnswer(Answer):
    """A response in progress: a list of items, of which the last may be open."""

    stream_end = b""  # the last event is recognisable by its type

    def __init__(self, head: Head, request: Json, spell: Spell | None, tools: Tools | None, formats: Formats) -> None:
        """`request` is the result of `repeated`."""
        super().__init__(head, 1, 1, spell)
        self._request = request
        self._tools, self._formats = tools, formats
        self._items: list[Item] = []
        self._num_events = 0
        self._num_reasoning = 0  # tokens
        self._logprobs: list[Json] = []  # of tokens whose text is not certain yet

    def last_chunks(self) -> Iterator[Json]:
        """The event with the whole response."""
        whole = self.whole()
        if self._status == "cancelled":
            whole["error"] = {"code": "server_error", "message": "the request was aborted"}
        yield self._event(_LAST_EVENTS.get(self._status, self._status), {"response": whole})

    def failed(self, error: ApiError) -> Iterator[Json]:
        """The event with the response so far, and the error that ended it."""
        if not self._num_events:
            yield from self._begun()
        if self._items and self._items[-1].status == "in_progress":
            self._items[-1].status = "incomplete"
        code = error.code if error.code == CONTEXT_EXCEEDED else _CODES.get(error.status, "server_error")
        fields: Json = {"code": code, "message": error.message, "param": error.param, "type": error.kind}
        yield self._event("failed", {"response": self._response("failed") | {"error": fields}})

    def whole(self) -> Json:
        """The response, once it is finished."""
        done = {"completed_at": int(time.time())} if self._status == "completed" else {}
        return self._response(self._status) | done | self._figures()

    @property
    def _status(self) -> str:
        return STATUSES[self.choices[0].finish_reason]

    def _added(self, index: int, event: Event) -> list[Json]:
        match event:
            case Started():
                self.contents[0] = AnswerContent(self.head.answer_id, event, self._tools, self._formats)
                return [*self._begun()]
            case Tokens():
                if self._token_bytes is not None:
                    self._logprobs += chat_logprobs(event.logprobs, self._token_bytes)
                return [*self._told_of(event.texts)]
            case Finished():
                return [*self._told_of((event.text,), is_end=True), *self._ended()]
        return []

    def _begun(self) -> Iterator[Json]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, {"response": self._response("in_progress")})

    def _told_of(self, texts: Sequence[str], *, is_end: bool = False) -> Iterator[Json]:
        """The events for the texts of further tokens, or for the last text."""
        content = self.contents[0]
        pieces, num_reasoning = content.pieces(texts, is_end=is_end), content.num_reasoning or 0
        del self._logprobs[: num_reasoning - self._num_reasoning]  # those of reasoning are left out
        self._num_reasoning = num_reasoning
        for piece in pieces:
            match piece:
                case ReasoningText(text):
                    yield from self._add(text, REASONING)
                case ContentText(text):
                    yield from self._add(text, MESSAGE)
                case CallBegun(name):
                    yield from self._begin(CallItem(self._item_id("fc"), content.calls[-1].call_id, name))
                case ArgumentsText(text):
                    yield from self._add(text)

    def _add(self, text: str, kind: TextKind | None = None) -> Iterator[Json]:
        """Add text to the last item, or to a new one unless that is of this kind."""
        last = self._items[-1] if self._items else None
        if kind is not None and (not isinstance(last, TextItem) or last.kind is not kind):
            yield from self._begin(TextItem(kind, self._item_id(kind.prefix)))
        yield self._item_event(self._items[-1].added(text, self._taken()))

    def _ended(self) -> Iterator[Json]:
        """The end of the last item; without any there is an empty message."""
        if not self._items:
            yield from self._begin(TextItem(MESSAGE, self._item_id(MESSAGE.prefix)))
        yield from self._end_item("completed" if self._status == "completed" else "incomplete")

    def _begin(self, item: Item) -> Iterator[Json]:
        if self._items:
            yield from self._end_item("completed")
        self._items.append(item)
        yield from map(self._item_event, item.begun())

    def _end_item(self, status: str) -> Iterator[Json]:
        yield from map(self._item_event, self._items[-1].ended(status, self._taken()))

    def _taken(self) -> list[Json]:
        """The log-probabilities for the last item; those that come with reasoning belong to the next item."""
        last = self._items[-1]
        if isinstance(last, TextItem) and last.kind is REASONING:
            return []
        logprobs, self._logprobs = self._logprobs, []
        return logprobs

    def _item_id(self, prefix: str) -> str:
        digest = hashlib.blake2b(f"{self.head.answer_id}/{len(self._items)}".encode(), digest_size=16).hexdigest()
        return f"{prefix}_{digest}"

    def _item_event(self, event: ItemEvent) -> Json:
        return self._event(event.kind, {"output_index": len(self._items) - 1} | event.fields)

    def _event(self, kind: str, fields: Json) -> Json:
        numbered: Json = {"type": f"response.{kind}", "sequence_number": self._num_events}
        self._num_events += 1
        return numbered | fields

    def _response(self, status: str) -> Json:
        """The response so far."""
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        fields: Json = {
            "id": self.head.answer_id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": [item.as_json() for item in self._items],
            "usage": None,
        }
        return self._request | ({"model": self.model} if self.model else {}) | fields

    def _usage(self) -> Json:
        prompt, cached, completion = self._counts()
        cached = cached or 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": prompt + completion,
        }
