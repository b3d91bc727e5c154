"""What the size of memory's pages is worth to reads from disk: large ones against small ones, turn by turn.

    python -m loadtest.pages

Each turn takes as much memory anew in large pages (`bough.model.cpu.huge_pages`) and in small ones, and reads the
demonstration target's files into each, past the page cache, piece by piece as the target worker does, with one thread
and with as many as the worker has. The turn's kinds take turns at being first. Ends with one JSON line: GB/s, medians,
and the median ratio.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from bough.cli.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder
from bough.config.processes import TargetConfig, parse
from bough.model.cpu.huge_pages import large_pages
from target_worker.link.direct_io import PIECE_BYTES

NUM_SLABS = 16


def small_pages(num_bytes: int) -> memoryview:
    """As many bytes of shared memory, whose pages are small on Linux as it is installed."""
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(memory)


KINDS: dict[str, Callable[[int], memoryview]] = {"large": large_pages, "small": small_pages}


def read_speed(files: list[Path], memory: memoryview, num_threads: int) -> float:
    """GB/s of reading all whole pieces of files, each into the next slab of the memory."""
    slabs = itertools.cycle([memory[i * PIECE_BYTES : (i + 1) * PIECE_BYTES] for i in range(NUM_SLABS)])
    descriptors = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    try:
        pieces = [
            (descriptor, [slab], offset)
            for descriptor in descriptors
            for offset, slab in zip(
                range(0, os.fstat(descriptor).st_size - PIECE_BYTES, PIECE_BYTES), slabs, strict=False
            )
        ]
        began = time.perf_counter()
        with ThreadPoolExecutor(num_threads) as threads:
            num_bytes = sum(threads.map(lambda piece: os.preadv(*piece), pieces))
        return num_bytes / (time.perf_counter() - began) / 1e9
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def main() -> None:
    """Prints a line for each turn, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    turns = parser.parse_args().turns
    ensure_demonstration()
    files = sorted(demonstration_folder().glob("*.safetensors"))
    thread_counts = (1, parse(TargetConfig, "bench", ["--model", str(demonstration_folder())], {}).link_threads)
    speeds: dict[tuple[str, int], list[float]] = {(kind, count): [] for kind in KINDS for count in thread_counts}
    for turn in range(turns):
        for kind in sorted(KINDS, reverse=turn % 2 == 0):
            memory = KINDS[kind](NUM_SLABS * PIECE_BYTES)
            memory[::4096] = bytes(len(memory[::4096]))  # what is not there yet would be charged to the read
            for count in thread_counts:
                speeds[kind, count].append(read_speed(files, memory, count))
        print({f"{kind}, {count} threads": round(times[-1], 2) for (kind, count), times in speeds.items()}, flush=True)
    print(
        json.dumps(
            {
                "gigabytes_per_second": {
                    kind: {count: round(median(speeds[kind, count]), 2) for count in thread_counts} for kind in KINDS
                },
                "large_to_small": {
                    count: round(
                        median(a / b for a, b in zip(speeds["large", count], speeds["small", count], strict=True)), 2
                    )
                    for count in thread_counts
                },
            }
        )
    )


if __name__ == "__main__":
    main()
