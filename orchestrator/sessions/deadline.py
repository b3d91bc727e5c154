"""How long a request may take, and how long of that it may wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from bough.errors import DeadlineExceeded

LATE_SECONDS = 1.0  # that a worker's call outlives the request: so the request is late, and never the worker

Item = TypeVar("Item")


@dataclass(slots=True)
class Deadline:
    """Of one request. Whatever it waits for is taken from one budget: a place, then a KV slot."""

    deadline: float = inf  # on the monotonic clock
    queue_seconds: float = inf  # that it may still wait

    @classmethod
    def of(cls, timeout_seconds: float | None, queue_seconds: float) -> Deadline:
        """From now on; without a timeout the caller waits for ever."""
        return cls(inf if timeout_seconds is None else time.monotonic() + timeout_seconds, queue_seconds)

    def within(self, timeout_seconds: float) -> float:
        """The time limit of a worker's call: its own, or what is left of the request where that is less."""
        return max(0.0, min(timeout_seconds, self.deadline + LATE_SECONDS - time.monotonic()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait: what it takes is gone from the budget."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.queue_seconds = max(0.0, self.queue_seconds - (time.monotonic() - began))

    async def bound(self, events: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        """The same events, ended in the middle of whatever they wait for once the deadline has passed; closed with it.

        Raises:
            DeadlineExceeded: it has.
        """
        async with aclosing(events):
            while True:
                try:
                    async with asyncio.timeout_at(self._on_the_loop):
                        event = await anext(events)
                except StopAsyncIteration:
                    return
                except TimeoutError as exc:
                    raise DeadlineExceeded("deadline: the time that the caller gave this request is over") from exc
                yield event

    @property
    def _on_the_loop(self) -> float | None:
        """The deadline by the event loop's clock."""
        if self.deadline == inf:
            return None
        return asyncio.get_running_loop().time() + self.deadline - time.monotonic()
