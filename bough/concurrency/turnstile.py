"""A turnstile for coroutines of one event loop, so that many that wake at once leave room for everything else."""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """Lets at most `most` callers through in each iteration of the event loop, first come, first served.

    Where fewer come, none of them waits. Where hundreds wake at once, timers, new calls and health checks get their
    turn after every few, and not after all.
    """

    def __init__(self, most: int) -> None:
        self._most = self._num_free = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False  # `_next_iteration` is going to be called

    async def turn(self) -> None:
        """Returns when the caller may go on; at once where there is room in this iteration."""
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
            if not turn.done():  # as it is where its caller was cancelled
                turn.set_result(None)
                self._num_free -= 1
        self._is_counting = self._num_free < self._most
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._next_iteration)
