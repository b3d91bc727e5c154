"""Whether processes' memory in use grows with the messages that they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from loadtest.fuzz.heap import Heap, heap_of

WARM_SHARE, WARM_MESSAGES = 0.25, 20_000  # of the messages, and at least so many: tables and caches fill
MOST_BYTES_A_MESSAGE = 40.0  # limit of the lowest slope; a kilobyte of each cancelled call made 50
PARTS = ("python_bytes", "malloc_bytes", "live_bytes", "resident_bytes")


class Slopes(NamedTuple):
    """Bytes a message between moments half of the time apart: as many slopes as there are such pairs."""

    lowest: float
    median: float
    highest: float


@dataclass(slots=True)
class MemorySeries:
    """The memory of processes at moments at which they have nothing to do."""

    folder: Path  # of the answers of `loadtest.fuzz.heap`
    heaps: dict[str, list[tuple[int, Heap]]] = field(default_factory=dict)  # by process: messages so far, memory

    async def measure(self, num_messages: int, process_ids: dict[str, int]) -> None:
        """Add the memory of processes that got `num_messages` so far. Raises TimeoutError."""
        for name, process_id in process_ids.items():
            self.heaps.setdefault(name, []).append((num_messages, await heap_of(self.folder, process_id)))

    def growth(self) -> dict[str, dict[str, Any]]:
        """Bytes in use and resident by process, and what each grew by for a message, after the warm-up."""
        return {name: _growth(_warm(heaps)) for name, heaps in self.heaps.items() if len(_warm(heaps)) >= 2}

    def told(self) -> str:
        """The latest figures, in megabytes in use and resident."""
        latest = {name: heaps[-1][1] for name, heaps in self.heaps.items()}
        return ", ".join(f"{n}: {h.live_bytes / 1e6:.2f} of {h.resident_bytes / 1e6:.1f} MB" for n, h in latest.items())

    def leaks(self) -> list[str]:
        """Processes whose memory in use grew, in every pair of moments, by more than a message's limit."""
        slopes = {name: each["live_bytes"]["a_message"] for name, each in self.growth().items()}
        return [
            f"{name}: memory in use grew by {slope.lowest:.1f} to {slope.highest:.1f} bytes a message"
            for name, slope in slopes.items()
            if slope.lowest > MOST_BYTES_A_MESSAGE
        ]


def _warm(heaps: Sequence[tuple[int, Heap]]) -> list[tuple[int, Heap]]:
    warm = max(WARM_MESSAGES, WARM_SHARE * heaps[-1][0])
    return [(number, heap) for number, heap in heaps if number >= warm]


def _growth(heaps: Sequence[tuple[int, Heap]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"from_message": heaps[0][0], "to_message": heaps[-1][0]}
    for part in PARTS:
        points = [(number, int(getattr(heap, part))) for number, heap in heaps]
        figures[part] = {"first": points[0][1], "last": points[-1][1], "a_message": slopes(points)}
    return figures


def slopes(points: Sequence[tuple[int, int]]) -> Slopes:
    """Slopes from each point of the first half to its counterpart in the second half; needs two points."""
    half = len(points) // 2
    pairs = zip(points[:half], points[-half:], strict=True)
    each = [round((to[1] - since[1]) / (to[0] - since[0]), 2) for since, to in pairs]
    return Slopes(min(each), round(median(each), 2), max(each))
