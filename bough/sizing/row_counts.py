"""The numbers of rows that go through a layer together."""

from __future__ import annotations

from typing import NamedTuple

OWN_MOST = 256  # rows of a chunk with bough's own products: few calls, and still within the processor's cache
SWEEP_TOKENS = 1024  # by default the most of a sweep, which on a GPU has more while the link takes longer
MOST_SWEEP_TOKENS = 4096  # then; a prompt of 8,000 tokens takes two sweeps


class RowCounts(NamedTuple):
    """Allowed numbers of rows: multiples of `step`, which divides `most`."""

    most: int
    step: int

    def padded(self, count: int) -> int:
        """The smallest multiple of `step` that is at least `count`, and at least one step."""
        return max(1, -(-count // self.step)) * self.step
