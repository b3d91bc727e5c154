"""Several streams as one: who is read when, and what ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from bough.errors import Unavailable
from bough.protocol.generation import Event, Started
from orchestrator.http_api.exchange import Indexed, merged

FOR_EVER = 3600.0


def event(number: int) -> Event:
    return Started("", number, 0, "")


class Source:
    """A stream that tells how far it has been read, and whether it was closed."""

    def __init__(self, num: int, error: Exception | None = None, waits_at: int = -1) -> None:
        self.num_made, self.is_closed, self.may_go_on = 0, False, asyncio.Event()
        self._num, self._error, self._waits_at = num, error, waits_at

    async def events(self) -> AsyncGenerator[Event]:
        try:
            for number in range(self._num):
                if number == self._waits_at:
                    await self.may_go_on.wait()
                self.num_made += 1
                yield event(number)
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


async def test_every_stream_comes_whole_and_in_order() -> None:
    sources = [Source(3), Source(0), Source(5)]
    seen = [one async for one in merged([source.events() for source in sources], FOR_EVER)]
    for number, source in enumerate(sources):
        own = [one.event for one in seen if one is not None and one.number == number]
        assert own == [event(index) for index in range(source.num_made)]
    assert [source.num_made for source in sources] == [3, 0, 5]


async def test_nobody_is_read_further_ahead_than_an_event() -> None:
    source = Source(100)
    events = merged([source.events()], FOR_EVER)
    for taken in range(1, 4):
        await anext(events)
        await asyncio.sleep(0.01)
        assert source.num_made <= taken + 2, "one that waits, and one that is held out"
    await events.aclose()
    assert source.is_closed


async def test_silence_is_told_and_loses_nothing() -> None:
    source = Source(2, waits_at=1)
    events = merged([source.events()], 0.01)
    assert await anext(events) == Indexed(0, event(0))
    assert await anext(events) is None
    assert await anext(events) is None
    source.may_go_on.set()
    assert [one async for one in events if one is not None] == [Indexed(0, event(1))]


async def test_the_first_error_ends_them_all() -> None:
    held, failing = Source(2, waits_at=1), Source(1, error=Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        async for _ in merged([held.events(), failing.events()], FOR_EVER):
            pass
    assert held.is_closed
    assert failing.is_closed
