"""Ending, shielding and cancelling asyncio tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

POLL_SECONDS = 0.05

Result = TypeVar("Result")


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, wait until they have ended, and ignore their results and exceptions."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Run coroutines as tasks during the block; their exceptions are not raised in it."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        await end(*tasks)


async def first_of(*work: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines until one has ended and raise its exception, if any; the others are cancelled."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end(*tasks)


async def came_true(condition: Callable[[], object], timeout_seconds: float) -> bool:
    """Wait until a condition holds, checked every POLL_SECONDS; False if it does not hold in time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


async def run_to_completion(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end even if cancelled; the cancellation is raised afterwards."""
    working = asyncio.create_task(work)
    is_cancelled = False
    while not working.done():
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            is_cancelled = True
        except Exception:
            break  # raised below
    if is_cancelled:
        raise asyncio.CancelledError
    return working.result()


@contextmanager
def cancellable() -> Iterator[None]:
    """Raises a cancellation that a library call in the block swallowed.

    Python 3.11's `asyncio.wait_for`, which redis-py uses, swallows one if its awaitable finishes at the same moment
    (python/cpython#86296).
    """
    task = asyncio.current_task()
    assert task is not None, "coroutines run in tasks"
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
