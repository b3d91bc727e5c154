"""/v1/responses: from events to the typed events of a stream, and to whole responses."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus

from bough.protocol.generation import Event, Finished, Function, GenerateOptions, Started, Tokens, Tools
from orchestrator.http_api.answer import Answer, Head
from orchestrator.http_api.errors import ApiError, Json
from orchestrator.http_api.reasoning import ChoiceReasoning, reasoning_in
from orchestrator.http_api.response_fields import ResponseFields, TextFormatFields
from orchestrator.http_api.response_items import CallItem, Item, ItemEvent, MessageItem, ReasoningItem
from orchestrator.http_api.spelling import Spell, chat_logprobs
from orchestrator.http_api.tool_calls import ChoiceCalls, Formats, calls_in
from orchestrator.tools.call_parser import ContentText, Piece
from orchestrator.tools.call_reader import ArgumentsText, CallBegun

STATUSES: Mapping[str | None, str] = {
    None: "in_progress",
    "stop": "completed",
    "length": "incomplete",
    "abort": "cancelled",
}
_CODES = {HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_exceeded", HTTPStatus.BAD_REQUEST: "invalid_prompt"}


def repeated(fields: ResponseFields, tools: Tools | None) -> Json:
    """What a response says of its request."""
    defaults, chosen = GenerateOptions(), fields.tool_choice
    return {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": fields.model or "",
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": None},
        "store": False,
        "temperature": defaults.temperature if fields.temperature is None else fields.temperature,
        "text": {"format": _format(fields.text.format if fields.text else None)},
        "tool_choice": "auto" if chosen is None else chosen.given,
        "tools": [_function(function) for function in tools.functions] if tools else [],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": defaults.top_p if fields.top_p is None else fields.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }


def _format(wanted: TextFormatFields | None) -> Json:
    if wanted is None:
        return {"type": "text"}
    if wanted.json_schema is None:
        return {"type": wanted.type}
    told: Json = {"name": wanted.name or "", "description": wanted.description, "strict": wanted.strict is not False}
    return {"type": wanted.type, "schema": json.loads(wanted.json_schema)} | told


def _function(function: Function) -> Json:
    return {
        "type": "function",
        "name": function.name,
        "description": function.description,
        "parameters": json.loads(function.parameters),
        "strict": function.is_strict,
    }


class ResponseAnswer(Answer):
    """A response in progress: a list of items, the last of which may be open."""

    stream_end = b""  # the last event says that it is the last

    def __init__(self, head: Head, request: Json, spell: Spell | None, tools: Tools | None, formats: Formats) -> None:
        """`request` is what `repeated` has of it."""
        super().__init__(head, 1, 1, spell)
        self._request = request
        self._tools, self._formats = tools, formats
        self._calls: ChoiceCalls | None = None
        self._reasoning: ChoiceReasoning | None = None
        self._items: list[Item] = []
        self._num_events = 0
        self._logprobs: list[Json] = []  # of tokens whose text has not come

    def last_chunks(self) -> Iterator[Json]:
        """The event that has the whole response."""
        kind = "completed" if self._status == "completed" else "incomplete"
        yield self._event(kind, {"response": self.whole()})

    def failed(self, error: ApiError) -> Iterator[Json]:
        """The event that has the response as far as it came, and why it came no further."""
        if not self._num_events:
            yield from self._begun()
        if self._items and self._items[-1].is_open:
            self._items[-1].status = "incomplete"
        code = _CODES.get(error.status, "server_error")
        told: Json = {"code": code, "message": error.message, "param": error.param, "type": error.kind}
        yield self._event("failed", {"response": self._told("failed") | {"error": told}})

    def whole(self) -> Json:
        """The response, once it is finished."""
        done = {"completed_at": int(time.time())} if self._status == "completed" else {}
        return self._told(self._status) | done | self._figures()

    @property
    def _status(self) -> str:
        return STATUSES[self.choices[0].finish_reason]

    def _added(self, index: int, event: Event) -> list[Json]:
        match event:
            case Started():
                self._calls = calls_in(self.head.answer_id, self._tools, self._formats, event.model_name)
                self._reasoning = reasoning_in(event.thoughts, has_calls=self._calls is not None)
                return [*self._begun()]
            case Tokens():
                if self._token_bytes is not None:
                    self._logprobs += chat_logprobs(event.logprobs, self._token_bytes)
                groups = (event.texts,) if self._reasoning is None else self._reasoning.groups(event.texts)
                return [added for texts in groups for added in self._said(texts)]
            case Finished():
                return [*self._said((event.text,), is_end=True), *self._ended()]
        return []

    def _begun(self) -> Iterator[Json]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, {"response": self._told("in_progress")})

    def _said(self, texts: Sequence[str], *, is_end: bool = False) -> Iterator[Json]:
        """What the texts of further tokens, or the last text, add to the items."""
        text = "".join(texts)
        if self._reasoning is not None:
            thoughts, text = self._reasoning.part(texts, is_end=is_end)
            self._count_thoughts(self._reasoning.num_tokens)
            if thoughts:
                if not self._items or not isinstance(self._items[-1], ReasoningItem):
                    yield from self._begin(ReasoningItem(self._item_id(ReasoningItem)))
                yield self._item_event(self._items[-1].added(thoughts, []))
        pieces: Iterable[Piece] = [ContentText(text)] if text else []
        if self._calls is not None:
            pieces = self._calls.pieces(text, is_end=is_end)
        for piece in pieces:
            match piece:
                case ContentText(more):
                    if not self._items or not isinstance(self._items[-1], MessageItem):
                        yield from self._begin(MessageItem(self._item_id(MessageItem)))
                    yield from self._add(more)
                case CallBegun(name):
                    assert self._calls is not None
                    call_id = self._calls.calls[-1].call_id
                    yield from self._begin(CallItem(self._item_id(CallItem), call_id=call_id, name=name))
                case ArgumentsText(more):
                    yield from self._add(more)

    def _count_thoughts(self, num: int) -> None:
        """Note that so many tokens are thoughts, whose log-probabilities are left out."""
        choice = self.choices[0]
        del self._logprobs[: num - (choice.reasoning_tokens or 0)]
        choice.reasoning_tokens = num

    def _ended(self) -> Iterator[Json]:
        """The end of the last item; without any there is an empty message."""
        if not self._items:
            yield from self._begin(MessageItem(self._item_id(MessageItem)))
        yield from self._end_item("completed" if self._status == "completed" else "incomplete")

    def _begin(self, item: Item) -> Iterator[Json]:
        yield from self._end_item("completed")
        self._items.append(item)
        yield from map(self._item_event, item.begun())

    def _add(self, text: str) -> Iterator[Json]:
        logprobs, self._logprobs = self._logprobs, []
        yield self._item_event(self._items[-1].added(text, logprobs))

    def _end_item(self, status: str) -> Iterator[Json]:
        if self._items and self._items[-1].is_open:
            item, logprobs = self._items[-1], self._logprobs
            if not isinstance(item, ReasoningItem):  # those that are left after thoughts are the next item's
                self._logprobs = []
            yield from map(self._item_event, item.ended(status, logprobs))

    def _item_id(self, kind: type[Item]) -> str:
        digest = hashlib.blake2b(f"{self.head.answer_id}/{len(self._items)}".encode(), digest_size=16).hexdigest()
        return f"{kind.prefix}_{digest}"

    def _item_event(self, event: ItemEvent) -> Json:
        return self._event(event.kind, {"output_index": len(self._items) - 1} | event.fields)

    def _event(self, kind: str, fields: Json) -> Json:
        numbered: Json = {"type": f"response.{kind}", "sequence_number": self._num_events}
        self._num_events += 1
        return numbered | fields

    def _told(self, status: str) -> Json:
        """The response so far."""
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        told: Json = {
            "id": self.head.answer_id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": [item.told() for item in self._items],
            "usage": None,
        }
        return self._request | ({"model": self.model} if self.model else {}) | told

    def _usage(self) -> Json:
        prompt, cached, completion = self._counts()
        cached = cached or 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self.choices[0].reasoning_tokens or 0},
            "total_tokens": prompt + completion,
        }
