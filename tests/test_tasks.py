"""Tasks that go on until somebody ends them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from bough import tasks


async def test_a_cancellation_that_a_library_swallows_is_raised() -> None:
    """Whether the library then returns, or fails."""

    async def swallow(failure: Exception | None) -> None:
        with tasks.cancellable():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if failure is not None:
                    raise failure from None
        raise AssertionError("it went on")

    swallowing = [asyncio.create_task(swallow(failure)) for failure in (None, TimeoutError("of its own"))]
    await asyncio.sleep(0)
    await tasks.end(*swallowing)
    assert all(task.cancelled() for task in swallowing)


async def test_a_time_limit_is_no_cancellation() -> None:
    """It cancels from within, and takes that back; so does one around it."""
    with suppress(TimeoutError), tasks.cancellable():
        async with asyncio.timeout(0) as limit:
            await asyncio.sleep(60)
    assert limit.expired()
    limit = asyncio.timeout(0)
    with suppress(TimeoutError):
        async with limit:
            with tasks.cancellable():
                await asyncio.sleep(60)
    assert limit.expired()


async def test_what_a_task_failed_with_is_not_raised() -> None:
    """Whoever ends it wants it gone."""

    async def fail() -> None:
        raise ValueError("on its own")

    failed = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await tasks.end(failed)
    assert isinstance(failed.exception(), ValueError)
