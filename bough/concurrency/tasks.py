"""Tasks that go on until somebody ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have ended, whatever they end with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """What must not be left half done: a cancellation is raised once it is over."""
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
    """Around calls of a library that may swallow a cancellation: it is raised at the end, whatever they made of it.

    Python 3.11's `asyncio.wait_for` does when what it waits for is there at that moment (python/cpython#86296), and
    redis-py writes to its sockets in this way.
    """
    task = asyncio.current_task()
    assert task is not None, "coroutines run in tasks"
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
