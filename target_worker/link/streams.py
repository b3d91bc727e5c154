"""Compute and copy streams of a device: the interface for streaming weights, and its implementation for CUDA.

Work is queued, not awaited: each stream runs in the order of calls, and only events order streams against each other.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any, NamedTuple, Protocol, cast

import torch

from bough.runtime.host_memory import large_pages, node_of, populate, prefer_node
from bough.sizing.placement import gigabytes

PIECE_BYTES = 32 << 20  # some 1 ms of a link, for which copies of other streams wait

logger = logging.getLogger(__name__)


class PinnedMemory:
    """Allocates host memory near the GPU and pins it; memory that cannot be pinned works too, but slower.

    A copy must lie within one allocation: CUDA does not know that two are adjacent.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = self.unpinned_bytes = 0  # in total, and of allocations that could not be pinned
        self._device = device
        # Address and memory of each allocation; kept alive, as another allocation could get the same address.
        self._pieces: list[tuple[int, memoryview]] = []

    def take(self, num_bytes: int) -> memoryview:
        """Allocate page-aligned memory."""
        memory = large_pages(num_bytes)
        self.num_bytes += num_bytes
        node = node_of(_pci_address(self._device))
        if node is not None and not prefer_node(memory, node):
            logger.info(
                "memory for %s comes from any NUMA node: the system refuses to bind it to node %d", self._device, node
            )
        populate(memory)  # faults pages in with several threads, where pinning has one
        self._pin(memory)
        return memory

    def _pin(self, memory: memoryview) -> None:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        with torch.cuda.device(self._device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0))
            if error == 0:
                self._pieces.append((address, memory))
                return
            self.unpinned_bytes += len(memory)
            logger.warning(
                "%s of host memory could not be pinned (CUDA error %d): copies from there to the GPU will be slower; "
                "a smaller --host-memory, or --kv-memory with KV on the host, may help",
                gigabytes(len(memory)),
                error,
            )
            with contextlib.suppress(RuntimeError):
                # Otherwise CUDA reports the error at the next kernel launch.
                torch.zeros(1, device=self._device).add_(1)

    def close(self) -> None:
        """Unpin all memory; no copy may be in flight."""
        with torch.cuda.device(self._device):
            for address, _ in self._pieces:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._pieces.clear()


def _pci_address(device: torch.device) -> str:
    """PCI address in Linux's notation, 0000:65:00.0; empty if torch does not know it."""
    found: Any = torch.cuda.get_device_properties(device)
    try:
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:
        return ""


class DeviceEvent(Protocol):
    """A point in a stream, reached when all work queued before it is done; `torch.cuda.Event` implements it."""

    def query(self) -> bool:
        """Whether it is reached."""

    def synchronize(self) -> None:
        """Block the calling thread until it is reached."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one of the same stream; both must be reached."""


class Copy(NamedTuple):
    """Begin and end of a queued copy."""

    begun: DeviceEvent
    done: DeviceEvent


class DeviceStreams(Protocol):
    """What streaming of weights needs from a device."""

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of `host_memory` that are not pinned; copies of them go through a staging buffer."""

    def host_memory(self, num_bytes: int) -> memoryview:
        """Allocate page-aligned host memory, pinned if the system allows it; valid until `close`.

        A copy must lie within one allocation.
        """

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        """Allocate (num_bytes,) uint8 on the device."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> Copy:
        """Queue a copy of contiguous memory between host and device that begins once `after` is reached."""

    def compute_after(self, event: DeviceEvent) -> None:
        """Make computation queued from now on wait for `event`."""

    def compute_event(self) -> DeviceEvent:
        """An event after all computation queued so far."""

    def close(self) -> None:
        """Wait for queued work and free the host memory."""


class CudaStreams:
    """A GPU's streams: the current stream computes, a separate one copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = PinnedMemory(device)
        self._copying = torch.cuda.Stream(device)
        self._lock = threading.Lock()  # only this copy may come between its two events

    @property
    def unpinned_bytes(self) -> int:
        return self._memory.unpinned_bytes

    def host_memory(self, num_bytes: int) -> memoryview:
        return self._memory.take(num_bytes)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> Copy:
        begun, done = _event(), _event()
        # The first of these restores the caller's device without making a context there, of hundreds of megabytes.
        with self._lock, torch.cuda.device(self.device), torch.cuda.stream(self._copying):
            if after is not None:
                self._copying.wait_event(cast(torch.cuda.Event, after))
            begun.record(self._copying)
            pieces = (torch.split(whole.view(-1), PIECE_BYTES // whole.itemsize) for whole in (source, target))
            for source_piece, target_piece in zip(*pieces, strict=True):
                target_piece.copy_(source_piece, non_blocking=True)
            done.record(self._copying)
        return Copy(begun, done)

    def compute_after(self, event: DeviceEvent) -> None:
        torch.cuda.current_stream(self.device).wait_event(cast(torch.cuda.Event, event))

    def compute_event(self) -> DeviceEvent:
        event = _event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._memory.close()


def _event() -> torch.cuda.Event:
    """An event with timing, on which threads wait asleep instead of spinning."""
    return torch.cuda.Event(enable_timing=True, blocking=True)
