"""The interface below the engine: computes the chosen parts and gives verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from bough.model.kv.slot import Slot
from bough.protocol.messages import Verdict
from bough.sizing.row_counts import RowCounts
from bough.sizing.sweep_times import SweepPrior
from target_worker.scheduler.batching import Part
from target_worker.scheduler.job import SweepFigures, VerifyJob


class Swept(NamedTuple):
    """Result of a sweep."""

    figures: SweepFigures
    verdict_on: Callable[[VerifyJob], Verdict]  # verdict on a tree of the sweep; raises errors of that call alone


class Sweeper(Protocol):
    """A streamed or simulated model, used by the sweep thread only."""

    rows: RowCounts  # rows computed together by a layer, and their padding

    def sweep(self, parts: Sequence[Part[VerifyJob]]) -> Swept:
        """Compute the parts and write their rows to their sessions' slots. Errors go to all of their calls.

        Verdicts are available until the next sweep.
        """

    def warm_up(self, slot: Slot) -> SweepPrior | None:
        """Run a first pass over rows of a slot, which compiles and allocates; raises errors of `bough.errors`.

        Returns what sweeps are expected to take; None if unknown.
        """
