"""Waiting for what another task, thread or process does. The deadline decides no test: it ends one that hangs."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

PATIENCE_SECONDS = 60.0  # much more than anything takes that tests wait for, also on a busy machine
POLL_SECONDS = 0.01


async def until(condition: Callable[[], object | Awaitable[object]], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until `condition` returns something true, or an awaitable of it. Raises TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not await _value(condition()):
            await asyncio.sleep(POLL_SECONDS)


def block_until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until a condition holds, in a thread without an event loop that would have to continue."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition was not met within {seconds} s")
        time.sleep(0.001)


async def _value(result: object) -> object:
    return await result if inspect.isawaitable(result) else result
