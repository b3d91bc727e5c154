"""Growth of memory in use is told from space between what is in use, and from what only fills."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

from loadtest.fuzz.heap import Heap, heap_of, measured
from loadtest.fuzz.memory import WARM_MESSAGES, MemorySeries, slopes
from tests.fakes.waiting import until

STEP = WARM_MESSAGES // 4


def series(in_use: int, between: int) -> MemorySeries:
    """A process that keeps so many bytes a message, and so many more are between them; a table fills at first."""
    numbers = [STEP * (moment + 1) for moment in range(16)]
    heaps = [(n, Heap(min(n, WARM_MESSAGES), 10**6 + in_use * n, 10**6 + (in_use + between) * n)) for n in numbers]
    return MemorySeries(Path(), {"orchestrator": heaps})


def test_only_what_is_in_use_and_goes_on_growing_is_a_leak() -> None:
    assert series(0, between=500).leaks() == []
    assert series(60, between=0).leaks() == ["orchestrator: memory in use grew by 60.0 to 60.0 bytes a message"]
    growth = series(60, between=5).growth()["orchestrator"]
    assert growth["from_message"] == WARM_MESSAGES
    told = {
        part: growth[part]["a_message"] for part in ("python_bytes", "malloc_bytes", "live_bytes", "resident_bytes")
    }
    assert told == {
        "python_bytes": (0, 0, 0),
        "malloc_bytes": (60, 60, 60),
        "live_bytes": (60, 60, 60),
        "resident_bytes": (65, 65, 65),
    }


def test_a_short_run_tells_nothing() -> None:
    short = MemorySeries(Path(), {"orchestrator": series(60, between=0).heaps["orchestrator"][:3]})
    assert (short.growth(), short.leaks()) == ({}, [])


def test_slopes_are_between_halves() -> None:
    assert slopes([(0, 0), (10, 50), (20, 40), (30, 80)]) == (1.5, 1.75, 2.0)


def test_a_process_tells_what_it_has_in_use() -> None:
    before = measured()
    small, large = [bytes(40) for _ in range(10_000)], bytes(3_000_000)
    after = measured()
    assert 700_000 < after.python_bytes - before.python_bytes < 900_000, "80 bytes each"
    assert 3_000_000 < after.malloc_bytes - before.malloc_bytes < 3_200_000
    assert len(small) + len(large)


async def test_a_process_that_is_measured_is_the_module_that_it_would_be(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "loadtest.fuzz.heap", str(tmp_path), "json.tool")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    status = Path(f"/proc/{process.pid}/status")
    await until(lambda: int(_caught(status), 16) >> (signal.SIGUSR2 - 1) & 1)  # it would end the process before
    heap = await heap_of(tmp_path, process.pid)
    assert 0 < heap.live_bytes < heap.resident_bytes
    said, _ = await process.communicate(b'{"a": 1}')
    assert json.loads(said) == {"a": 1}


def _caught(status: Path) -> str:
    return next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt"))
