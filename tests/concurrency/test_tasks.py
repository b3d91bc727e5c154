"""Tasks that run until they are ended."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from bough.concurrency import tasks


async def test_a_cancellation_swallowed_by_a_library_is_raised() -> None:
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


async def test_a_time_limit_is_not_a_cancellation() -> None:
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


async def test_the_exception_of_an_ended_task_is_not_raised() -> None:
    """Its caller wants it to end."""

    async def fail() -> None:
        raise ValueError("on its own")

    failed = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await tasks.end(failed)
    assert isinstance(failed.exception(), ValueError)


async def test_work_finishes_before_a_cancellation_is_raised() -> None:
    done: list[str] = []
    is_begun, may_end = asyncio.Event(), asyncio.Event()

    async def work() -> str:
        is_begun.set()
        await may_end.wait()
        done.append("work")
        return "result"

    assert await asyncio.gather(tasks.run_to_completion(work()), _set(may_end)) == ["result", None]
    is_begun.clear()
    may_end.clear()
    cancelled = asyncio.create_task(tasks.run_to_completion(work()))
    await is_begun.wait()
    for _ in range(2):
        cancelled.cancel()
        await asyncio.sleep(0)
    assert not cancelled.done()
    may_end.set()
    await asyncio.wait({cancelled})
    assert cancelled.cancelled()
    assert done == ["work", "work"]


async def test_the_exception_of_the_work_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("on its own")

    with pytest.raises(ValueError, match="on its own"):
        await tasks.run_to_completion(fail())


async def _set(event: asyncio.Event) -> None:
    event.set()


async def test_slower_tasks_are_cancelled_and_the_first_ones_exception_is_raised() -> None:
    was_cancelled = asyncio.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    async def fail() -> None:
        raise ValueError("first")

    await tasks.first_of(asyncio.sleep(0), wait_for_ever())
    assert was_cancelled.is_set()
    with pytest.raises(ValueError, match="first"):
        await tasks.first_of(wait_for_ever(), fail())
