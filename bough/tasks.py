"""Tasks that go on until somebody ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have ended, whatever they end with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
