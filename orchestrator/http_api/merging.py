"""Merges several streams of events into one with a heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from bough.concurrency.tasks import end
from bough.protocol.generation import Event


class Indexed(NamedTuple):
    """An event with the index of its stream."""

    number: int
    event: Event


class _Ended(NamedTuple):
    """The end of a stream, possibly with an error."""

    error: Exception | None


async def merged(streams: Sequence[AsyncGenerator[Event]], silent_seconds: float) -> AsyncGenerator[Indexed | None]:
    """Yield the events of all streams as they come, and None after each `silent_seconds` without one.

    Each stream is read by its own task, at most one event ahead. The first error ends all streams and is raised;
    closing this generator ends them too.
    """
    queue: asyncio.Queue[Indexed | _Ended] = asyncio.Queue(maxsize=1)
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
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        await end(*tasks)


async def _read(index: int, stream: AsyncGenerator[Event], queue: asyncio.Queue[Indexed | _Ended]) -> None:
    error: Exception | None = None
    try:
        async with aclosing(stream):
            async for event in stream:
                await queue.put(Indexed(index, event))
    except Exception as exc:  # raised by the reader of the merged stream
        error = exc
    await queue.put(_Ended(error))
