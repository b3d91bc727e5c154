"""A session's place at a target, and the queue of sessions that wait for a KV slot."""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from bough.errors import Exhausted
from orchestrator.cluster.worker_handle import TargetHandle


@dataclass(slots=True, eq=False)
class QueuePlace:
    """A waiting session's place in the queue, and targets' answers meanwhile."""

    epoch: int  # a time: when its request began, or was moved
    is_first: asyncio.Event = field(default_factory=asyncio.Event)  # set while no older session waits
    began: float = field(default_factory=time.monotonic)
    refusal: Exhausted = field(default_factory=lambda: Exhausted("KV memory: no target has room"))  # the last one
    has_home_refused: bool = False  # the session's own target has answered that it has no room

    async def first(self, deadline: float) -> None:
        """Wait until no older session waits. Raises Exhausted at `deadline`, in seconds on the monotonic clock."""
        try:
            async with asyncio.timeout_at(deadline if deadline < inf else None):
                await self.is_first.wait()
        except TimeoutError as exc:
            raise Exhausted("no KV slot came free in time (--queue-timeout)") from exc


class SlotQueue:
    """Ordered by age, not by arrival: a session preempted in the middle of a request comes before new ones."""

    def __init__(self) -> None:
        self._places: list[QueuePlace] = []

    @property
    def is_empty(self) -> bool:
        return not self._places

    @contextmanager
    def place(self, epoch: int) -> Iterator[QueuePlace]:
        place = QueuePlace(epoch)
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


class PlaceState(Enum):
    """A session's state at its target. While it waits it is counted nowhere."""

    NEW = "new"  # the target has not been asked yet
    HELD = "held"  # the target has answered a call, and keeps the session's KV
    WAITING = "waiting"  # for a slot at any target
    RESERVED = "reserved"  # the target has a slot for the session, and lacks some of its tokens
    MOVING = "moving"  # to this target, where it must reserve a slot before it sends its tokens


@dataclass(slots=True, eq=False)
class TargetPlace:
    """A running session's place; it alone writes where the session is and what its target holds.

    The target counts the session while the block runs.
    """

    target: TargetHandle  # while the session waits: the one that it was at
    held: int = 0  # tokens that the target is assumed to hold
    state: PlaceState = PlaceState.NEW
    num_refused: int = 0  # refusals for lack of room since the last verdict or failure
    queue_place: QueuePlace | None = None  # while the session waits
    _began: float = 0.0  # since when it is counted, in seconds on the monotonic clock
    _leaving: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> TargetPlace:
        self._count(self.state)
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.close()

    def believe(self, num_tokens: int) -> None:
        """Assume that the target holds so many of the session's tokens."""
        self.held = num_tokens

    def answered(self) -> None:
        """The target has given a verdict."""
        self.state, self.num_refused = PlaceState.HELD, 0

    def refused(self, believed: int) -> None:
        """The target has no room. The session's slot keeps its `believed` tokens: if some are gone, as after a long
        pause, so is the slot."""
        self.num_refused += 1
        if self.held < believed:
            self.state = PlaceState.NEW

    def gave_way(self) -> None:
        """The session was preempted; the target reports what it still holds when there is room."""
        self.num_refused += 1
        self.held, self.state = 0, PlaceState.NEW

    def wait(self, queue: SlotQueue, epoch: int) -> None:
        """Leave the target, and wait for a slot at any one."""
        self._leaving.close()
        self.state, self.queue_place = PlaceState.WAITING, self._leaving.enter_context(queue.place(epoch))

    def has_no_room(self, target: TargetHandle, refusal: Exhausted) -> None:
        """A target has refused a slot to the waiting session."""
        assert self.queue_place is not None, "it waits"
        self.num_refused += 1
        self.queue_place.refusal = refusal
        self.queue_place.has_home_refused |= target is self.target

    def reserved(self, target: TargetHandle, held: int) -> None:
        """A target has a slot for the waiting session, and holds so many of its tokens."""
        self._leaving.close()
        self.target, self.held = target, held
        self._count(PlaceState.RESERVED)

    def move(self, target: TargetHandle) -> None:
        """Go to another target, as this one has failed."""
        self._leaving.close()
        self.target, self.held = target, 0
        self._count(PlaceState.MOVING)

    def interrupted(self) -> None:
        """A call has failed. A session that waited must reserve a slot again."""
        self.num_refused = 0
        if self.state is PlaceState.WAITING:
            self._leaving.close()
            self._count(PlaceState.MOVING)

    def _count(self, state: PlaceState) -> None:
        self.state, self.queue_place, self._began = state, None, time.monotonic()
        self.target.num_running += 1
        self._leaving.callback(self._uncount)

    def _uncount(self) -> None:
        self.target.num_running -= 1
        if self.state is PlaceState.HELD:
            self.target.speed.stay_seconds.add(time.monotonic() - self._began)
