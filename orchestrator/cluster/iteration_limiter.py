"""Limits how many coroutines continue in one iteration of the event loop, so that bursts delay nothing else."""

from __future__ import annotations

import asyncio
from collections import deque


class IterationLimiter:
    """Lets at most `most` callers continue in each iteration of the event loop, first come, first served.

    Fewer callers never wait. If hundreds wake at once, timers, new calls and health checks run after every few of
    them instead of after all.
    """

    def __init__(self, most: int) -> None:
        self._most = self._num_free = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False  # whether `_next_iteration` is scheduled

    async def acquire(self) -> None:
        """Wait until the caller may continue; returns at once if this iteration's limit is not reached."""
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next_iteration)
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next_iteration(self) -> None:
        self._num_free = self._most
        while self._waiting and self._num_free:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise the caller was cancelled
                turn.set_result(None)
                self._num_free -= 1
        self._is_counting = self._num_free < self._most
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._next_iteration)
