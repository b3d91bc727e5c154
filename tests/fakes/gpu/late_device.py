"""A fake accelerator that runs queued work late, in a random order among those that its events allow."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bough.runtime.host_memory import large_pages
from target_worker.link.streams import Copy, DeviceEvent


class FakeEvent:
    """A DeviceEvent that is reached when the work queued before it is done."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached.wait(10), "nobody will ever reach this event"

    def elapsed_time(self, end_event: Any) -> float:
        assert self.query()
        assert end_event.query(), "time is read when both events are reached"
        return 1.0


class Work(NamedTuple):
    """A piece of work in a stream's queue, and whether it may begin."""

    may_begin: Callable[[], bool]
    act: Callable[[], object]


class FakeStreams:
    """DeviceStreams whose thread takes work from either queue at random; a copy is two pieces, half the bytes each."""

    unpinned_bytes = 0

    def __init__(self, seed: int) -> None:
        self._choice = random.Random(seed)
        self._streams: dict[str, deque[Work]] = {"copy": deque(), "compute": deque()}
        self._state = threading.Condition()
        self._copying = threading.Lock()  # keeps the pieces of a copy adjacent in the queue
        self._is_held = self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def host_memory(self, num_bytes: int) -> memoryview:
        return large_pages(num_bytes)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> Copy:
        middle = len(source) // 2
        with self._copying:
            self._queue("copy", lambda: None, after)
            begun = self._event("copy")
            self._queue("copy", lambda: target[:middle].copy_(source[:middle]))
            self._queue("copy", lambda: target[middle:].copy_(source[middle:]))
            return Copy(begun, self._event("copy"))

    def compute(self, act: Callable[[], object]) -> None:
        """Queue a kernel in the compute stream."""
        self._queue("compute", act)

    def compute_after(self, event: DeviceEvent) -> None:
        self._queue("compute", lambda: None, event)

    def compute_event(self) -> DeviceEvent:
        return self._event("compute")

    def hold(self, is_held: bool) -> None:
        """Stop running queued work while `is_held`; work can still be queued."""
        with self._state:
            self._is_held = is_held
            self._state.notify_all()

    def close(self) -> None:
        with self._state:
            self._is_closed, self._is_held = True, False
            self._state.notify_all()
        self._thread.join()

    def _event(self, stream: str) -> FakeEvent:
        event = FakeEvent()
        self._queue(stream, event.reached.set)
        return event

    def _queue(self, stream: str, act: Callable[[], object], after: DeviceEvent | None = None) -> None:
        with self._state:
            self._streams[stream].append(Work(lambda: after is None or after.query(), act))
            self._state.notify_all()

    def _runnable(self) -> list[str]:
        return [name for name, stream in self._streams.items() if stream and stream[0].may_begin()]

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._is_closed or (not self._is_held and self._runnable()))
                names = self._runnable()
                if not names:
                    return
                work = self._streams[self._choice.choice(names)].popleft()
            work.act()
