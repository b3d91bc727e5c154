"""What a process has in memory."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

MIB = 1 << 20
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    """Figures of all arenas of glibc's allocator, see mallinfo2(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def malloc_bytes() -> int:
    """Bytes that malloc has given to this process and that are in use, after a collection of garbage."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    gc.collect()
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def rss_bytes(process_id: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * 4096
