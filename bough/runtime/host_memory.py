"""Memory that is allocated before it is used: in huge pages, by several threads, and near a device.

The system allocates and zeroes a page when a thread first touches it, a few gigabytes per second and thread. On a
machine with several memory nodes (NUMA) the page comes from that thread's node; a device on another node then copies
over the link between the nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bough.runtime.machine import ROOT, usable_cpus

MADV_POPULATE_WRITE = 23  # of madvise(2), since Linux 5.14
MPOL_PREFERRED = 1  # of mbind(2): other nodes if this one has no memory left
MBIND = {"x86_64": 237, "aarch64": 235}  # system call number by processor, as libc has no function for it
PAGE_BYTES = 4096
PART_BYTES = 64 * 1024 * 1024  # that a thread touches at a time
MOST_THREADS = 8
MASK_BITS = 1024  # of the set of nodes
LARGE_PAGE = 2 * 1024 * 1024


def large_pages(num_bytes: int) -> memoryview:
    """Page-aligned zeroed memory, in pages of 2 MB if the system has them; allocated when first written.

    Small pages cost an address translation every 4 KB, and split disk reads if they are not contiguous.
    The memory is private, because Linux by default gives shared memory small pages only, and it is aligned for huge
    pages.
    """
    whole = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE
    memory = mmap.mmap(-1, whole + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the system has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -np.frombuffer(memory, np.uint8).ctypes.data % LARGE_PAGE
    return memoryview(memory)[begin : begin + num_bytes]


def node_of(pci_address: str, root: Path = ROOT) -> int | None:
    """The memory node nearest to a device; None if there is only one, or the system does not report it."""
    try:
        node = int((root / "sys/bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(memory: memoryview, node: int) -> bool:
    """Bind pages that are not allocated yet to a node; False if the system or a container's rules refuse."""
    number = MBIND.get(platform.machine())
    if number is None or not 0 <= node < MASK_BITS:
        return False
    mask = (ctypes.c_ulong * (MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] = 1 << (node % bits)
    begin, size = ctypes.c_void_p(_address(memory)), ctypes.c_ulong(len(memory))
    return int(_libc().syscall(number, begin, size, MPOL_PREFERRED, mask, ctypes.c_ulong(MASK_BITS), 0)) == 0


def populate(memory: memoryview, num_threads: int = 0) -> None:
    """Allocate all pages of unwritten, page-aligned memory; 0 threads picks a useful number."""
    parts = [memory[begin : begin + PART_BYTES] for begin in range(0, len(memory), PART_BYTES)]
    with ThreadPoolExecutor(num_threads or min(MOST_THREADS, usable_cpus()), thread_name_prefix="pages") as threads:
        for _ in threads.map(_take, parts):
            pass


def in_pieces(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Split sizes into runs of at most `most` bytes each; a larger size is a run by itself."""
    runs: list[list[int]] = []
    for size in sizes:
        if not runs or sum(runs[-1]) + size > most:
            runs.append([])
        runs[-1].append(size)
    return runs


def _take(part: memoryview) -> None:
    begin, size = ctypes.c_void_p(_address(part)), ctypes.c_size_t(len(part))
    if _libc().madvise(begin, size, MADV_POPULATE_WRITE) != 0:  # an older kernel
        np.frombuffer(part, np.uint8)[::PAGE_BYTES] = 0


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
