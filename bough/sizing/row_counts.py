"""How many rows go through a layer together."""

from __future__ import annotations

from typing import NamedTuple

OWN_MOST = 256  # rows of a chunk whose products are bough's own: fewer calls for each row, and they still fit a cache


class RowCounts(NamedTuple):
    """Numbers of rows that are allowed: multiples of `step`, itself a divisor of `most`."""

    most: int
    step: int

    def padded(self, count: int) -> int:
        """The least multiple of a step from `count` on, but at least one."""
        return max(1, -(-count // self.step)) * self.step
