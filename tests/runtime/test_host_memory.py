"""Memory in large pages: asked for so that the system can give them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bough.runtime.host_memory import LARGE_PAGE, large_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPPINGS = Path("/proc/self/smaps")


@pytest.mark.parametrize("num_bytes", [1, 4096, LARGE_PAGE - 1, LARGE_PAGE, 3 * LARGE_PAGE + 5])
def test_a_buffer_begins_at_a_large_page_and_is_zero(num_bytes: int) -> None:
    numbers = np.frombuffer(large_pages(num_bytes), np.uint8)
    assert len(numbers) == num_bytes
    assert not numbers.any()
    assert numbers.ctypes.data % LARGE_PAGE == 0


@pytest.mark.skipif(not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="this system has no large pages")
def test_a_buffer_is_in_large_pages() -> None:
    memory = np.frombuffer(large_pages(8 * LARGE_PAGE), np.uint8)
    memory[:] = 1
    assert in_large_pages(memory.ctypes.data) >= 4 * LARGE_PAGE  # all, where the system finds as many


def in_large_pages(address: int) -> int:
    """Bytes of the mapping around an address that are in large pages."""
    is_around = False
    for line in MAPPINGS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            begin, end = (int(bound, 16) for bound in first.split("-"))
            is_around = begin <= address < end
        elif is_around and first == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    raise LookupError(f"{address:x} is not mapped")
