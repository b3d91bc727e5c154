"""What is measured of a sweep."""

from __future__ import annotations

from typing import NamedTuple


class SweepFigures(NamedTuple):
    """Where a sweep's time went."""

    total_ns: int
    wait_ns: int  # for layers that had not arrived
    link_ns: int  # the link was at work, since the last sweep ended
    link_bytes: int
    link_ideal_ns: int  # link_bytes at the best speed that the link has shown (`BestSpeed`)
    kv_bytes: int = 0  # of keys and values, copied between host and accelerator beside them
