"""The seam below the engine: what takes the chosen parts through the target's layers and says what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from bough.model.kv.slot import Slot
from bough.protocol.messages import Verdict
from bough.sizing.row_counts import RowCounts
from bough.sizing.sweep_times import SweepPrior
from target_worker.scheduler.batching import Part
from target_worker.scheduler.job import VerifyJob
from target_worker.scheduler.sweep_figures import SweepFigures


class Swept(NamedTuple):
    """What a sweep came to."""

    figures: SweepFigures
    verdict_on: Callable[[VerifyJob], Verdict]  # on a tree that was in it; raises what one call alone has to be told


class Sweeper(Protocol):
    """A streamed model, or a simulated one. Belongs to the sweep thread."""

    rows: RowCounts  # of matrix products: how many go through a layer together, and how they are padded

    def sweep(self, parts: Sequence[Part[VerifyJob]]) -> Swept:
        """Computes the parts, whose rows stand in their sessions' slots then. What it raises is told to all of them.

        Verdicts may be asked for until the next sweep.
        """
        ...

    def warm_up(self, slot: Slot) -> SweepPrior | None:
        """Makes what is made at the first use, with rows of a slot; raises what `bough.errors` names.

        Returns what sweeps can be expected to take, by what this has; None where nothing can be said.
        """
        ...
