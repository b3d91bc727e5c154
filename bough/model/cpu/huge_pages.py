"""Memory from the system, in as few pages as it gives."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

LARGE_PAGE = 2 * 1024 * 1024


def large_pages(num_bytes: int) -> memoryview:
    """Zeros from the beginning of a page, in pages of 2 MB where the system has them; taken when first written to.

    Small pages lie anywhere: a look-up for every 4 KB that are computed with, and a read from disk is cut up into as
    many transfers as there are gaps between them. So the memory is private (what is shared counts as a file, which
    Linux by default gives small pages only), and its pages begin and end where large ones may.
    """
    whole = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE
    memory = mmap.mmap(-1, whole + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a Python, or a system, without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -np.frombuffer(memory, np.uint8).ctypes.data % LARGE_PAGE
    return memoryview(memory)[begin : begin + num_bytes]
