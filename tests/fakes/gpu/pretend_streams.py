"""Streams of the pretended device: copies run as early as events allow, as late as they allow, or at a random time."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from bough.runtime.host_memory import large_pages
from target_worker.link.streams import Copy, DeviceEvent
from tests.fakes.gpu.pretend import UNWRITTEN, Pretended, notes, raw
from tests.fakes.gpu.pretend_order import Clock, compute_stream

NEVER, ALWAYS = 0.0, 1.0  # probabilities that a copy runs before anything waits for it
_numbers = count()


class PretendedEvent:
    """A point in a stream; copies queued before it run at the latest when something waits for it."""

    def __init__(self, clock: Clock, hurry: Callable[[PretendedEvent], None] | None) -> None:
        self.clock = clock
        self.is_reached = hurry is None
        self._hurry = hurry

    def query(self) -> bool:
        return self.is_reached

    def reach(self) -> None:
        """Run all copies queued before the event."""
        if not self.is_reached:
            assert self._hurry is not None
            self._hurry(self)

    def synchronize(self) -> None:
        self.reach()
        notes.order.host_waits(self.clock)

    def elapsed_time(self, end_event: Any) -> float:
        assert self.query()
        assert end_event.query(), "time is read when both events are reached"
        return 1.0


class PretendedStreams:
    """DeviceStreams with a copy stream that runs late; the compute stream runs at once."""

    def __init__(self, chance: float = ALWAYS, seed: int = 0, index: int = 0) -> None:
        """Each time a copy is queued, outstanding copies run, oldest first, each with probability `chance`."""
        self.unpinned_bytes, self._index = 0, index
        self._stream, self._chance, self._choice = f"copies {next(_numbers)}", chance, random.Random(seed)
        self._queue: deque[tuple[Callable[[], object], PretendedEvent]] = deque()
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
                assert isinstance(after, PretendedEvent)
                after.reach()
                notes.order.waits(self._stream, after.clock)
            begun = self._event()
            from_, to = raw(source), raw(target)
            mine = [x.raw for x in (source, target) if isinstance(x, Pretended)]
            notes.order.works(self._stream, *(([], mine) if isinstance(target, Pretended) else (mine, [])))
            done = self._event()
            self._queue += [(lambda: None, begun), (lambda: to.copy_(from_), done)]
            while self._queue and self._choice.random() < self._chance:
                self._next()
        return Copy(begun, done)

    def compute_after(self, event: DeviceEvent) -> None:
        assert isinstance(event, PretendedEvent)
        event.reach()
        notes.order.waits(compute_stream(self._index), event.clock)

    def compute_event(self) -> DeviceEvent:
        return PretendedEvent(notes.order.progress_of(compute_stream(self._index)), None)

    def close(self) -> None:
        with self._lock:
            while self._queue:
                self._next()

    def _event(self) -> PretendedEvent:
        return PretendedEvent(notes.order.progress_of(self._stream), self._run_to)

    def _run_to(self, event: PretendedEvent) -> None:
        with self._lock:
            while not event.is_reached:
                self._next()

    def _next(self) -> None:
        act, event = self._queue.popleft()
        act()
        event.is_reached = True
