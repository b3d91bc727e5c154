"""How long a sweep takes, from those that were: the link's time, or the products' where those take longer."""

from __future__ import annotations

from target_worker.sweep import SweepFigures

WEIGHT = 0.5  # of the last sweep
NANO = 1e-9


class Pace:
    """Learns from every sweep; knows nothing before the first, and then takes none for longer than another."""

    def __init__(self, rows: int) -> None:
        """`rows` of a chunk: products take their time by whole chunks."""
        self._rows = rows
        self._link_seconds = 0.0
        self._chunk_seconds = 0.0
        self._is_new = True

    def observe(self, num_tokens: int, figures: SweepFigures) -> None:
        """After a sweep."""
        weight = 1.0 if self._is_new else WEIGHT
        self._is_new = False
        chunk_seconds = (figures.total_ns - figures.wait_ns) * NANO / self._num_chunks(num_tokens)
        self._link_seconds += weight * (figures.link_ns * NANO - self._link_seconds)
        self._chunk_seconds += weight * (chunk_seconds - self._chunk_seconds)

    def seconds(self, num_tokens: int) -> float:
        """Of a sweep of so many tokens."""
        return max(self._link_seconds, self._num_chunks(num_tokens) * self._chunk_seconds)

    def _num_chunks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._rows)
