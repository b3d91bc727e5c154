"""Answers one HTTP request that generates, as a whole or as server-sent events, while its client is connected.

The streams of its choices start together, and are merged into one with a heartbeat.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from bough.concurrency.tasks import end
from bough.protocol.generation import Event, Finished, PromptLogprobs, Started, Tokens
from orchestrator.http_api.answers.answer import Answer
from orchestrator.http_api.fields.errors import Json, api_error
from orchestrator.http_api.fields.options import RequestedOutput
from orchestrator.serving.tenants import Tenant

SILENT_SECONDS = 5.0  # silence after which a stream sends a keep-alive; sweeps may take longer
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx would buffer the stream
]
KEEP_ALIVE = b": keep-alive\n\n"
ITEM_END = "response.output_item.done"  # repeats a whole item of a response
MANY_ENTRIES = 10_000  # these take some 10 ms to encode
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Exchange:
    """ASGI application for one request with a parsed body. It raises no error that a client can cause."""

    streams: Callable[[], AbstractContextManager[Sequence[AsyncGenerator[Event]]]]  # one for each choice
    answer: Answer
    field_names: Mapping[str, str]  # `names` of `api_error`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request; if the client disconnects, its requests end and free their resources."""
        answered = self._stream if self.answer.head.is_stream else self._whole
        await _unless_gone(receive, answered(scope, receive, send))

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self.streams() as streams:
                async with aclosing(merged(streams, SILENT_SECONDS)) as events:
                    async for one in events:
                        if one is not None:
                            await self._chunks(one)
            response = await self._response()
        except Exception as exc:  # every error becomes a status here
            response = api_error(exc, self.field_names).response()
        await response(scope, receive, send)

    async def _response(self) -> Response:
        whole = self.answer.whole()
        if self.answer.num_entries < MANY_ENTRIES:
            return JSONResponse(whole)
        return Response(await asyncio.to_thread(_in_steps, whole), media_type="application/json")

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the answer. An error before the first byte becomes a status, a later one an event."""
        writer = _Writer(send)
        try:
            await self._written(writer)
        except Exception as exc:  # every error becomes a status or an event here
            error = api_error(exc, self.field_names)
            if not writer.has_begun:
                await error.response()(scope, receive, send)
                return
            await writer.write(await self._maybe_large(self.answer.failed(error)))
        await writer.write(self.answer.stream_end)
        await send({"type": "http.response.body", "body": b""})

    async def _written(self, writer: _Writer) -> None:
        with self.streams() as streams:
            async with aclosing(merged(streams, SILENT_SECONDS)) as events:
                await writer.begin(await self._opened(events))
                async for one in events:
                    await writer.write(KEEP_ALIVE if one is None else await self._data(one))
        await writer.write(await self._maybe_large(self.answer.last_chunks()))

    async def _opened(self, events: AsyncGenerator[Indexed | None]) -> bytes:
        """The first bytes of the stream, once all requests have started or after `SILENT_SECONDS`."""
        beginning, deadline = b"", time.monotonic() + SILENT_SECONDS
        num_waiting = len(self.answer.choices)
        while num_waiting:
            one = await anext(events)
            if one is None:
                return beginning + KEEP_ALIVE
            beginning += await self._data(one)
            num_waiting -= isinstance(one.event, Started)
            if time.monotonic() > deadline:
                break
        return beginning

    async def _data(self, one: Indexed) -> bytes:
        chunks = await self._chunks(one)
        if isinstance(one.event, PromptLogprobs) or any(each.get("type") == ITEM_END for each in chunks):
            return await self._maybe_large(chunks)
        return b"".join(map(_data, chunks))

    async def _maybe_large(self, chunks: Iterable[Json]) -> bytes:
        """The events of chunks that may have all log-probabilities of the answer; many are written in a thread."""
        if self.answer.num_entries < MANY_ENTRIES:
            return b"".join(map(_data, chunks))
        return await asyncio.to_thread(lambda: b"".join(_data(chunk, _in_steps) for chunk in chunks))

    async def _chunks(self, one: Indexed) -> list[Json]:
        if isinstance(one.event, PromptLogprobs):  # of hundreds of tokens, each perhaps with dozens of alternatives
            return await asyncio.to_thread(self.answer.chunks, *one)
        return self.answer.chunks(*one)


@dataclass(slots=True)
class _Writer:
    """Sends a stream as fast as it is read; the server closes a connection that is not read."""

    send: Send
    has_begun: bool = False

    async def begin(self, data: bytes) -> None:
        """Send status, headers and the first data."""
        self.has_begun = True
        await self.send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await self.write(data)

    async def write(self, data: bytes) -> None:
        """Send data, if there is any."""
        if data:
            await self.send({"type": "http.response.body", "body": data, "more_body": True})


def _at_once(value: Json) -> bytes:
    return _ENCODER.encode(value).encode()


def _in_steps(value: Json) -> bytes:
    """Encode like `_at_once`, but in pieces, to let other threads run."""
    written = bytearray()
    for part in _ENCODER.iterencode(value):
        written += part.encode()
    return bytes(written)


def _data(value: Json, encode: Callable[[Json], bytes] = _at_once) -> bytes:
    kind = value.get("type")
    name = f"event: {kind}\n".encode() if kind else b""
    return name + b"data: " + encode(value) + b"\n\n"


async def _unless_gone(receive: Receive, work: Coroutine[None, None, None]) -> None:
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        await end(working, leaving)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Indexed(NamedTuple):
    """An event with the index of its stream."""

    number: int
    event: Event


@contextmanager
def scored_first(tenant: Tenant, wanted: Sequence[RequestedOutput]) -> Iterator[list[AsyncGenerator[Event]]]:
    """The streams of all requests; if one scores its prompt, the prompt's others start after the scores.

    Raises as `Tenant.together` does.
    """
    with tenant.together(wanted) as streams:
        scored: _Scored | None = None
        ordered = []
        for (_, options), stream in zip(wanted, streams, strict=True):
            if options.prompt_logprobs is not None:
                scored = _Scored()
                stream = scored.leading(stream)
            elif scored is not None:
                stream = scored.following(stream, has_output=options.max_tokens > 0)
            ordered.append(stream)
        yield ordered


@dataclass(slots=True)
class _Scored:
    """A prompt that is scored for several requests."""

    _are_scored: asyncio.Event = field(default_factory=asyncio.Event)
    _ends: list[Event] = field(default_factory=list)  # the first and the last event of the request that scores

    async def leading(self, stream: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
        """The events of the request that scores."""
        async with aclosing(stream):
            async for event in stream:
                if isinstance(event, Started | Finished):
                    self._ends.append(event)
                if isinstance(event, Tokens | Finished):
                    self._are_scored.set()
                yield event

    async def following(self, stream: AsyncGenerator[Event], *, has_output: bool) -> AsyncGenerator[Event]:
        """The events of another request, which starts after the scores; without output it has nothing else to do."""
        async with aclosing(stream):
            await self._are_scored.wait()
            if has_output:
                async for event in stream:
                    yield event
            else:
                for event in self._ends:
                    yield event


async def merged(streams: Sequence[AsyncGenerator[Event]], silent_seconds: float) -> AsyncGenerator[Indexed | None]:
    """Yield the events of all streams as they come, and None after each `silent_seconds` without one.

    Each stream is read by its own task, at most one event ahead. The first error ends all streams and is raised;
    closing this generator ends them too.
    """
    queue: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue(maxsize=1)  # a stream ends with the latter two
    tasks = [asyncio.create_task(_read(index, stream, queue)) for index, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            try:
                async with asyncio.timeout(silent_seconds):
                    item = await queue.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, Indexed):
                yield item
            elif item is not None:
                raise item
            else:
                num_open -= 1
    finally:
        await end(*tasks)


async def _read(index: int, stream: AsyncGenerator[Event], queue: asyncio.Queue[Indexed | Exception | None]) -> None:
    error: Exception | None = None
    try:
        async with aclosing(stream):
            async for event in stream:
                await queue.put(Indexed(index, event))
    except Exception as exc:  # raised by the reader of the merged stream
        error = exc
    await queue.put(error)
