"""The limiter lets callers that wake together continue a few at a time, in order; a single caller does not wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from orchestrator.cluster.worker_clients import IterationLimiter


async def test_who_comes_alone_does_not_wait() -> None:
    """With few streams the limiter must cost nothing, not even one iteration of the event loop."""
    limiter, is_next_iteration = IterationLimiter(2), asyncio.Event()
    asyncio.get_running_loop().call_soon(is_next_iteration.set)
    await limiter.acquire()
    await limiter.acquire()
    assert not is_next_iteration.is_set()


async def test_a_burst_goes_through_a_few_at_a_time_and_in_order() -> None:
    """Fifty rounds whose verdicts come together must not hold up the event loop until the last of them is done."""
    limiter, loop = IterationLimiter(3), asyncio.get_running_loop()
    iteration, passed = 0, list[tuple[int, int]]()

    def count() -> None:
        nonlocal iteration
        iteration += 1
        if len(passed) < 50:
            loop.call_soon(count)

    async def come(number: int) -> None:
        await limiter.acquire()
        passed.append((number, iteration))

    loop.call_soon(count)
    await asyncio.gather(*map(come, range(50)))
    assert [number for number, _ in passed] == list(range(50))
    assert max(Counter(when for _, when in passed).values()) == 3
    assert passed[-1][1] - passed[0][1] >= 16


async def test_who_is_cancelled_while_waiting_takes_nobodys_turn() -> None:
    """Clients that hang up in a burst leave their turns to the others."""
    limiter = IterationLimiter(1)
    tasks = [asyncio.create_task(limiter.acquire()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(tasks[0], tasks[4])
    for task in tasks[1:4]:
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
    await limiter.acquire()
