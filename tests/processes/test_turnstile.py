"""The turnstile: who wakes together goes on a few at a time, in order, and whoever comes alone does not wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from bough.concurrency.turnstile import Turnstile


async def test_who_comes_alone_does_not_wait() -> None:
    """With few streams a turnstile must cost nothing: not even one iteration of the event loop."""
    turnstile, is_next_iteration = Turnstile(2), asyncio.Event()
    asyncio.get_running_loop().call_soon(is_next_iteration.set)
    await turnstile.turn()
    await turnstile.turn()
    assert not is_next_iteration.is_set()


async def test_a_burst_goes_through_a_few_at_a_time_and_in_order() -> None:
    """Fifty rounds whose verdicts come together must not hold up the event loop until the last of them is done."""
    turnstile, loop = Turnstile(3), asyncio.get_running_loop()
    iteration, passed = 0, list[tuple[int, int]]()

    def count() -> None:
        nonlocal iteration
        iteration += 1
        if len(passed) < 50:
            loop.call_soon(count)

    async def come(number: int) -> None:
        await turnstile.turn()
        passed.append((number, iteration))

    loop.call_soon(count)
    await asyncio.gather(*map(come, range(50)))
    assert [number for number, _ in passed] == list(range(50))
    assert max(Counter(when for _, when in passed).values()) == 3
    assert passed[-1][1] - passed[0][1] >= 16


async def test_who_is_cancelled_while_waiting_takes_nobodys_turn() -> None:
    """Clients that hang up in a burst leave their turns to the others."""
    turnstile = Turnstile(1)
    tasks = [asyncio.create_task(turnstile.turn()) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(tasks[0], tasks[4])
    for task in tasks[1:4]:
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
    await turnstile.turn()
