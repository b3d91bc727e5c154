"""How the C library's allocator is to give memory back: what a process took for a moment it must not keep."""

from __future__ import annotations

import ctypes
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # as glibc's <malloc.h> numbers them
BLOCK_BYTES = 1024**2  # what is as large has pages of its own, which go back when it is freed
SPARE_BYTES = 8 * 1024**2  # at the end of the heap, kept for the next moment
ARENAS = 4  # heaps, of which each thread uses one: more are more places with room that is not used


def give_memory_back() -> None:
    """To be called before there are threads; does nothing where the C library is another.

    Left alone, glibc raises the size from which on a block has pages of its own to the largest that was ever freed, up
    to 32 MB. Then weights on their way, and logits of the largest batch yet, come from the heap and leave gaps in it:
    a draft worker kept 205 MB of such gaps after loading its model, and more with every larger tree.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for what, value in ((MMAP_THRESHOLD, BLOCK_BYTES), (TRIM_THRESHOLD, SPARE_BYTES), (ARENA_MAX, ARENAS)):
            mallopt(what, value)


def give_back_now() -> None:
    """Pages in the middle of heaps that nothing is in, such as after a model has been loaded."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
