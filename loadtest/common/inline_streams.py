"""Streams without a device: what copies to a GPU and computes there is run on a machine that has none."""

from __future__ import annotations

from typing import Any

import torch

from bough.runtime.host_memory import large_pages
from target_worker.link.streams import Copy, DeviceEvent


class Reached:
    """DeviceEvent that is always reached."""

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: Any) -> float:
        """0: time is not measured."""
        return 0.0


class InlineStreams:
    """DeviceStreams without a device: host memory stands in for device memory, and copies are immediate."""

    unpinned_bytes = 0

    def host_memory(self, num_bytes: int) -> memoryview:
        """Allocate ordinary memory."""
        return large_pages(num_bytes)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        """Allocate ordinary memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> Copy:
        """Copy before returning."""
        target.copy_(source)
        return Copy(Reached(), Reached())

    def compute_after(self, event: DeviceEvent) -> None:
        """Nothing to do: no copy is outstanding."""

    def compute_event(self) -> DeviceEvent:
        """A reached event."""
        return Reached()

    def close(self) -> None:
        """Nothing to do."""
