"""Measurements of a sweep."""

from __future__ import annotations

from typing import NamedTuple


class SweepFigures(NamedTuple):
    """Where a sweep's time went."""

    total_ns: int
    wait_ns: int  # waiting for layers
    link_ns: int  # the link was busy, since the last sweep ended
    link_bytes: int  # that arrived since the last sweep ended: reads run ahead, so some are for later sweeps
    link_ideal_ns: int  # link_bytes at the best speed that the link has shown (`BestSpeed`)
    kv_bytes: int = 0  # KV copied between host and device
