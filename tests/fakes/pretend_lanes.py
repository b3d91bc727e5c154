"""Lanes of the pretended device: copies run as early as marks allow, as late, or when chance has it."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from bough.model.cpu.huge_pages import large_pages
from target_worker.link.streams import Copy, DeviceEvent
from tests.fakes.pretend import UNWRITTEN, Pretended, notes, raw
from tests.fakes.pretend_order import Clock, compute_lane

NEVER, ALWAYS = 0.0, 1.0  # chances that a copy which may run does
_numbers = count()


class PretendedMark:
    """A point in a lane; what the copying lane has queued before it may still have to run."""

    def __init__(self, clock: Clock, hurry: Callable[[PretendedMark], None] | None) -> None:
        self.clock = clock
        self.is_reached = hurry is None
        self._hurry = hurry

    def query(self) -> bool:
        return self.is_reached

    def reach(self) -> None:
        """Has all that stands before it done."""
        if not self.is_reached:
            assert self._hurry is not None
            self._hurry(self)

    def synchronize(self) -> None:
        self.reach()
        notes.order.host_waits(self.clock)

    def elapsed_time(self, end_event: Any) -> float:
        assert self.query()
        assert end_event.query(), "time is read when both marks are reached"
        return 1.0


class PretendedLanes:
    """One lane that copies, beside the one that computes, which runs at once."""

    def __init__(self, chance: float = ALWAYS, seed: int = 0, index: int = 0) -> None:
        """With `chance` a copy runs when another is queued, and what nobody waited for is not made before."""
        self.unpinned_bytes, self._index = 0, index
        self._lane, self._chance, self._choice = f"copies {next(_numbers)}", chance, random.Random(seed)
        self._queue: deque[tuple[Callable[[], object], PretendedMark]] = deque()
        self._lock = threading.RLock()

    def host_memory(self, num_bytes: int) -> memoryview:
        return large_pages(num_bytes)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        memory = torch.full((num_bytes,), UNWRITTEN, dtype=torch.uint8)
        notes.order.watch(memory)
        return Pretended(memory, self._index)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> Copy:
        assert source.is_contiguous(), "one copy, one run of bytes"
        assert target.is_contiguous()
        with self._lock:
            if after is not None:
                assert isinstance(after, PretendedMark)
                after.reach()  # of the computing lane, or of this one's past
                notes.order.waits(self._lane, after.clock)
            begun = self._mark()
            from_, to = raw(source), raw(target)
            mine = [x.raw for x in (source, target) if isinstance(x, Pretended)]
            notes.order.works(self._lane, *(([], mine) if isinstance(target, Pretended) else (mine, [])))
            done = self._mark()
            self._queue += [(lambda: None, begun), (lambda: to.copy_(from_), done)]
            while self._queue and self._choice.random() < self._chance:
                self._next()
        return Copy(begun, done)

    def compute_after(self, mark: DeviceEvent) -> None:
        assert isinstance(mark, PretendedMark)
        mark.reach()
        notes.order.waits(compute_lane(self._index), mark.clock)

    def compute_mark(self) -> DeviceEvent:
        return PretendedMark(notes.order.mark(compute_lane(self._index)), None)

    def close(self) -> None:
        with self._lock:
            while self._queue:
                self._next()

    def _mark(self) -> PretendedMark:
        return PretendedMark(notes.order.mark(self._lane), self._run_to)

    def _run_to(self, mark: PretendedMark) -> None:
        with self._lock:
            while not mark.is_reached:
                self._next()

    def _next(self) -> None:
        act, mark = self._queue.popleft()
        act()
        mark.is_reached = True
