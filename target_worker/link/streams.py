"""An accelerator's lanes of work: one computes, another copies meanwhile. The seam below what streams.

Work is queued, not awaited: the order within a lane is the order of the calls, and between lanes only marks order it.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

import torch

from bough.model.cpu.huge_pages import large_pages
from target_worker.link.pinned_memory import PinnedMemory


class DeviceEvent(Protocol):
    """A point in a lane, reached when all that was queued there before is done. `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it is reached."""
        ...

    def synchronize(self) -> None:
        """Blocks the calling thread until it is."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to a later mark of the same lane, both reached."""
        ...


class Copy(NamedTuple):
    """A copy that is queued."""

    begun: DeviceEvent
    done: DeviceEvent


class DeviceStreams(Protocol):
    """What streaming asks of an accelerator."""

    @property
    def unpinned_bytes(self) -> int:
        """Of `host_memory` that is not pinned: not copied from directly, but with a stop in between."""
        ...

    def host_memory(self, num_bytes: int) -> memoryview:
        """Page-aligned memory of the host, pinned where the system allows it; valid until `close`.

        No copy may reach from one such piece into another.
        """
        ...

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        """(num_bytes,) uint8 on the accelerator."""
        ...

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> Copy:
        """Queues a copy between host and accelerator that begins once `after` is reached."""
        ...

    def compute_after(self, mark: DeviceEvent) -> None:
        """What is queued to compute from now on begins once a mark is reached."""
        ...

    def compute_mark(self) -> DeviceEvent:
        """The point that the computing lane has been told to reach so far."""
        ...

    def close(self) -> None:
        """Ends what is queued and gives the host's memory back."""
        ...


class CudaStreams:
    """A GPU's: the current stream computes, a stream of its own copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = PinnedMemory(device)
        self._copying = torch.cuda.Stream(device)
        self._lock = threading.Lock()  # between the marks of a copy there is nothing but it, whoever else queues

    @property
    def unpinned_bytes(self) -> int:
        """Of pieces of memory for which the system refused it."""
        return self._memory.unpinned_bytes

    def host_memory(self, num_bytes: int) -> memoryview:
        """Pinned in one piece; without pinning, and with a warning, where the system refuses."""
        return self._memory.take(num_bytes)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        """From torch's allocator."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> Copy:
        """On the copying stream."""
        begun, done = _event(), _event()
        with self._lock, torch.cuda.stream(self._copying):
            if after is not None:
                self._copying.wait_event(after)  # type: ignore[arg-type]  # marks of this class are events
            begun.record(self._copying)
            target.copy_(source, non_blocking=True)
            done.record(self._copying)
        return Copy(begun, done)

    def compute_after(self, mark: DeviceEvent) -> None:
        """The current stream waits."""
        torch.cuda.current_stream(self.device).wait_event(mark)  # type: ignore[arg-type]

    def compute_mark(self) -> DeviceEvent:
        """An event on the current stream."""
        event = _event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def close(self) -> None:
        """Waits for both streams, then unpins."""
        torch.cuda.synchronize(self.device)
        self._memory.close()


def _event() -> torch.cuda.Event:
    """With time, and for a thread that waits: asleep, not spinning."""
    return torch.cuda.Event(enable_timing=True, blocking=True)


class Reached:
    """A mark of lanes that do everything at once."""

    def query(self) -> bool:
        """It is."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: Any) -> float:
        """Not measured."""
        return 0.0


class InlineStreams:
    """No accelerator: memory of the host stands for its own, and copies are made at once. For tests and dry runs."""

    unpinned_bytes = 0

    def host_memory(self, num_bytes: int) -> memoryview:
        """Ordinary."""
        return large_pages(num_bytes)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        """Ordinary."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> Copy:
        """Made before this returns."""
        target.copy_(source)
        return Copy(Reached(), Reached())

    def compute_after(self, mark: DeviceEvent) -> None:
        """Nothing is ever outstanding."""

    def compute_mark(self) -> DeviceEvent:
        """Reached."""
        return Reached()

    def close(self) -> None:
        """Nothing is held."""
