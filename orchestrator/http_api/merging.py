"""Several streams of events as one, that falls silent for no longer than is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from bough.concurrency.tasks import end
from bough.protocol.generation import Event


class Indexed(NamedTuple):
    """An event, and the number of the stream that it is from."""

    number: int
    event: Event


class _Ended(NamedTuple):
    """A stream has no more events, or had none but this error."""

    error: Exception | None


async def merged(streams: Sequence[AsyncGenerator[Event]], silent_seconds: float) -> AsyncGenerator[Indexed | None]:
    """The events of all streams as they come; None after each `silent_seconds` without one.

    Every stream is read by a task of its own, no further ahead than one event. The first error ends them all and is
    raised; so does closing this one.
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
    except Exception as exc:  # it is raised where the events are read
        error = exc
    await queue.put(_Ended(error))
