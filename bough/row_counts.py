"""How many rows go through a layer together."""

from __future__ import annotations

from typing import NamedTuple


class RowCounts(NamedTuple):
    """Numbers of rows that are allowed: multiples of `step`, itself a divisor of `most`."""

    most: int
    step: int

    def padded(self, count: int) -> int:
        """The least multiple of a step from `count` on, but at least one."""
        return max(1, -(-count // self.step)) * self.step
