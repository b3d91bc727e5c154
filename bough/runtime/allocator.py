"""Settings of glibc's allocator that return freed memory to the system."""

from __future__ import annotations

import ctypes
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # from glibc's <malloc.h>
BLOCK_BYTES = 1024**2  # blocks of this size or more are mapped separately and unmapped when freed
SPARE_BYTES = 8 * 1024**2  # free memory kept at the end of the heap
ARENAS = 4  # heaps, shared by all threads; each adds unused space


def configure_allocator() -> None:
    """Fix the allocator's thresholds; call it before threads start. No effect with another C library.

    By default glibc raises its mmap threshold to the largest block ever freed, up to 32 MB. Then weights being loaded
    and large logits come from the heap and fragment it: a draft worker kept 205 MB of such gaps after loading its
    model, and more with every larger tree.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for what, value in ((MMAP_THRESHOLD, BLOCK_BYTES), (TRIM_THRESHOLD, SPARE_BYTES), (ARENA_MAX, ARENAS)):
            mallopt(what, value)


def trim_heap() -> None:
    """Return unused heap pages to the system, for example after loading a model."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
