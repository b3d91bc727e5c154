"""What a process keeps in memory, apart from what its allocators hold for later.

`python -m loadtest.fuzz.heap FOLDER MODULE ...` runs MODULE as `python -m` would. At SIGUSR2 it collects garbage, gives
freed memory back to the system (`malloc_trim`), and writes the figures of `Heap` to FOLDER.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import re
import runpy
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType

POLL_SECONDS = 0.05
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
SMALL_BLOCKS = re.compile(rb"# bytes in allocated blocks\s*=\s*([\d,]+)")
RESIDENT = re.compile(r"^RssAnon:\s*(\d+) kB$", re.MULTILINE)


class _Mallinfo2(ctypes.Structure):
    """Figures of all arenas of glibc's allocator, see mallinfo2(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


@dataclass(frozen=True, slots=True)
class Heap:
    """A process's memory in bytes."""

    python_bytes: int  # in use: objects of up to 512 bytes, which Python has an allocator of its own for
    malloc_bytes: int  # in use: everything else, of Python and of libraries
    resident_bytes: int  # what the system has given, the unused space between what is in use included

    @property
    def live_bytes(self) -> int:
        """What is in use; only a leak makes it grow for ever."""
        return self.python_bytes + self.malloc_bytes


def measured() -> Heap:
    """The memory of this process, without garbage."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    gc.collect()
    libc.malloc_trim(0)
    info = libc.mallinfo2()
    resident = RESIDENT.search(Path("/proc/self/status").read_text())
    assert resident is not None, "Linux tells it of every process"
    return Heap(_small_blocks(), info.uordblks + info.hblkhd, int(resident[1]) * 1024)


def _small_blocks() -> int:
    """Bytes in use of Python's own allocator, which tells them on the standard error of the process."""
    with TemporaryFile() as told:
        usual = os.dup(2)
        os.dup2(told.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(usual, 2)
            os.close(usual)
        told.seek(0)
        found = SMALL_BLOCKS.search(told.read())
    assert found is not None, "CPython tells it unless PYTHONMALLOC=malloc"
    return int(found[1].replace(b",", b""))


async def heap_of(folder: Path, process_id: int) -> Heap:
    """The memory of a process that was started by this module. Raises TimeoutError if it does not answer."""
    path = _answer(folder, process_id)
    path.unlink(missing_ok=True)
    os.kill(process_id, signal.SIGUSR2)
    async with asyncio.timeout(60):
        while not path.exists():
            await asyncio.sleep(POLL_SECONDS)
    return Heap(**json.loads(path.read_text()))


def _answer(folder: Path, process_id: int) -> Path:
    return folder / f"heap-{process_id}.json"


def main() -> None:
    """Run the module, which answers the signal from its start on."""
    folder, module, sys.argv[1:] = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]

    def tell(_: int, __: FrameType | None) -> None:
        path = _answer(folder, os.getpid())
        path.with_suffix(".part").write_text(json.dumps(asdict(measured())))
        path.with_suffix(".part").rename(path)

    signal.signal(signal.SIGUSR2, tell)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
