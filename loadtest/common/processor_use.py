"""What processes have of the processors: time that they ran, and time that they would have run had a core been free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NANO = 1e-9


class ProcessorUse(NamedTuple):
    """Seconds since a process's start, of all threads that it has now."""

    ran: float
    waited: float  # for a core, being ready to run

    def __sub__(self, earlier: ProcessorUse) -> ProcessorUse:
        return ProcessorUse(self.ran - earlier.ran, self.waited - earlier.waited)


def processor_use(process_id: int) -> ProcessorUse:
    """Of a process that runs; threads that have ended, as those that answer for metrics do, are left out."""
    return ProcessorUse(*(NANO * sum(column) for column in zip(*_threads(process_id), strict=True)))


def _threads(process_id: int) -> Iterator[tuple[int, int]]:
    for task in Path(f"/proc/{process_id}/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            ran, waited, _ = (task / "schedstat").read_text().split()
            yield int(ran), int(waited)
