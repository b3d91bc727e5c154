"""Begins several streams of events, and merges them into one with a heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from bough.concurrency.tasks import end
from bough.protocol.generation import Event, Finished, Started, Tokens
from orchestrator.http_api.fields.options import RequestedOutput
from orchestrator.serving.tenants import Tenant


class Indexed(NamedTuple):
    """An event with the index of its stream."""

    number: int
    event: Event


@contextmanager
def scored_first(tenant: Tenant, wanted: Sequence[RequestedOutput]) -> Iterator[list[AsyncGenerator[Event]]]:
    """The streams of all requests; where one scores its prompt, the prompt's others begin after the scores.

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

    _is_told: asyncio.Event = field(default_factory=asyncio.Event)
    _ends: list[Event] = field(default_factory=list)  # the first and the last event of the request that scores

    async def leading(self, stream: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
        """The events of the request that scores."""
        async with aclosing(stream):
            async for event in stream:
                if isinstance(event, Started | Finished):
                    self._ends.append(event)
                if isinstance(event, Tokens | Finished):
                    self._is_told.set()
                yield event

    async def following(self, stream: AsyncGenerator[Event], *, has_output: bool) -> AsyncGenerator[Event]:
        """The events of another, which begins after the scores; without output it would do nothing else than those."""
        async with aclosing(stream):
            await self._is_told.wait()
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
