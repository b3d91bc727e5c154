"""Page-locked host memory, from which a GPU copies directly, as far as the system allows."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from bough.runtime.host_memory import node_of, populate, prefer_node
from bough.runtime.huge_pages import large_pages
from bough.sizing.placement import gigabytes

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
                "memory for %s comes from any NUMA node: the system refuses to have it of node %d", self._device, node
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
                "%s of host memory could not be pinned (CUDA error %d): copies of what is there to the GPU will be "
                "slower; a smaller --host-memory, or --kv-memory with KV on the host, may help",
                gigabytes(len(memory)),
                error,
            )
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device).add_(1)  # CUDA keeps the error for whoever next launches a kernel

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
