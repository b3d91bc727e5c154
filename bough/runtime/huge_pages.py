"""Memory in huge pages, where the system has them."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

LARGE_PAGE = 2 * 1024 * 1024


def large_pages(num_bytes: int) -> memoryview:
    """Page-aligned zeroed memory, in pages of 2 MB where the system has them; allocated when first written.

    Small pages cost an address translation every 4 KB, and split reads from disk wherever they are not contiguous.
    The memory is private, because Linux by default gives shared memory small pages only, and it is aligned for huge
    pages.
    """
    whole = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE
    memory = mmap.mmap(-1, whole + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the system has no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -np.frombuffer(memory, np.uint8).ctypes.data % LARGE_PAGE
    return memoryview(memory)[begin : begin + num_bytes]
