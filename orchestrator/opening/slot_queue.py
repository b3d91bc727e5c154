"""Queue of sessions that wait for a KV slot at the same targets; only the oldest asks for one."""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bough.errors import Exhausted


@dataclass(slots=True, eq=False)
class Place:
    """A waiting session's place."""

    epoch: int  # a time: when its request began, or was moved
    is_first: asyncio.Event = field(default_factory=asyncio.Event)  # set while no older session waits

    async def first(self, deadline: float) -> None:
        """Wait until no older session waits. Raises Exhausted at `deadline`, in seconds on the monotonic clock."""
        seconds = deadline - time.monotonic()
        try:
            async with asyncio.timeout(seconds if seconds < float("inf") else None):
                await self.is_first.wait()
        except TimeoutError as exc:
            raise Exhausted("no KV slot came free in time (--queue-timeout)") from exc


class SlotQueue:
    """Ordered by age, not by arrival: a session preempted in the middle of a request comes before new ones."""

    def __init__(self) -> None:
        self._places: list[Place] = []

    @property
    def is_empty(self) -> bool:
        """Whether no session waits."""
        return not self._places

    @contextmanager
    def place(self, epoch: int) -> Iterator[Place]:
        """Hold a place during the block."""
        place = Place(epoch)
        insort(self._places, place, key=lambda each: each.epoch)
        self._tell()
        try:
            yield place
        finally:
            self._places.remove(place)
            self._tell()

    def _tell(self) -> None:
        for index, place in enumerate(self._places):
            (place.is_first.clear if index else place.is_first.set)()
