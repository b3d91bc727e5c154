"""Memory from the system, in as few pages as it gives."""

from __future__ import annotations

import mmap


def large_pages(num_bytes: int) -> mmap.mmap:
    """Zeros, in pages of 2 MB where the system has them.

    Small ones cost a look-up for every 4 KB that are read, and a read from disk must hold on to each of them.
    """
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
