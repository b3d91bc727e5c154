"""Memory of the host that a GPU copies from directly, piece by piece, as far as the system lets it be pinned."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from bough.model.cpu.huge_pages import large_pages
from bough.runtime.host_memory import node_of, populate, prefer_node
from bough.sizing.placement import gigabytes

logger = logging.getLogger(__name__)


class PinnedMemory:
    """Takes memory, near the GPU where the system allows it, and pins it; unpinned it serves as well, and slower.

    A copy must lie in one piece: CUDA knows pieces, and not that one follows another.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = self.unpinned_bytes = 0  # in all, and of pieces that were refused
        self._device = device
        self._pieces: list[tuple[int, memoryview]] = []  # by address; kept, or another's memory could come to be there

    def take(self, num_bytes: int) -> memoryview:
        """Another piece, from the beginning of a page."""
        memory = large_pages(num_bytes)
        self.num_bytes += num_bytes
        node = node_of(_pci_address(self._device))
        if node is not None and not prefer_node(memory, node):
            logger.info(
                "memory for %s comes from any NUMA node: the system refuses to have it of node %d", self._device, node
            )
        populate(memory)  # by several threads; pinning has one
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
                torch.zeros(1, device=self._device)  # CUDA remembers the error for the next launch: let it be this one

    def close(self) -> None:
        """Unpins all; nothing may copy any more."""
        with torch.cuda.device(self._device):
            for address, _ in self._pieces:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._pieces.clear()


def _pci_address(device: torch.device) -> str:
    """As Linux names it, 0000:65:00.0; nothing where torch does not say."""
    found: Any = torch.cuda.get_device_properties(device)
    try:
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:
        return ""
