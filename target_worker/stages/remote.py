"""The head's side of a pass through the stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

import torch

from bough.errors import AcceleratorFull, RingLost
from bough.model.batch.batch import Batch
from bough.protocol.messages import Timings
from target_worker.stages.frames import Frame
from target_worker.stages.pass_codec import pass_from_wire, pass_to_wire
from target_worker.stages.passes import StagePass
from target_worker.stages.ring import Ring
from target_worker.stages.slots import SlotLog

NEVER = -1
ANSWER_SECONDS = 600.0  # limit of a pass through all stages; heartbeats find a stage that is gone much sooner


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Where the time of passes through the stages went."""

    stages: tuple[Timings, ...] = ()  # in order; empty before the first pass
    network_ns: int = 0  # in which none of them had the pass
    began_ns: int = 0  # of the last pass, by time.perf_counter_ns

    def __add__(self, last: StageTimes) -> StageTimes:
        stages = tuple(map(add, self.stages, last.stages)) if self.stages else last.stages
        return StageTimes(stages, self.network_ns + last.network_ns, last.began_ns)


class PassInFlight(NamedTuple):
    """A pass on its way through the stages."""

    epoch: int
    batch: Batch
    began_ns: int
    arrived: Future[Frame]


class OtherStages:
    """Sends the hidden states of a sweep around the ring; used by the sweep thread."""

    def __init__(self, ring: Ring, log: SlotLog, trouble: Callable[[], str]) -> None:
        """`trouble` says what is missing while the ring is down."""
        self._ring, self._log, self._trouble = ring, log, trouble
        self._epoch = NEVER  # in which the stages hold what the slots say
        self._awaited: Future[Frame] | None = None  # of the last pass, which comes back after all others
        self.last, self.total = StageTimes(), StageTimes()  # of the last pass, and of all

    def lost_kv(self) -> bool:
        """Whether the stages have forgotten all slots since the last call, which the head must then forget too.

        Raises RingLost while a stage is missing.
        """
        epoch = self._ring.epoch
        if not epoch:
            raise RingLost(self._trouble() or "a stage was missing until now")
        is_new, self._epoch = epoch != self._epoch, epoch
        if is_new:
            self._log.forget()
        return is_new

    def send(self, batch: Batch, hidden: torch.Tensor) -> PassInFlight:
        """Send the rows (1, num_rows, hidden_size) after the head's last layer to the stages.

        Raises RingLost if a stage is lost.
        """
        began_ns = time.perf_counter_ns()
        given = StagePass.of(self._log.take(), batch, hidden)
        epoch, self._epoch = self._epoch, NEVER  # if this fails, the stages lack changes of slots
        self._ring.send(epoch, Frame(*pass_to_wire(given)))
        self._epoch = epoch
        self._awaited = arrived = self._ring.receiving(epoch, ANSWER_SECONDS)
        return PassInFlight(epoch, batch, began_ns, arrived)

    def receive(self, sent: PassInFlight) -> torch.Tensor:
        """The rows (1, num_rows, hidden_size) after the last stage's layers.

        Raises RingLost if a stage is lost, and AcceleratorFull if one has no memory for so many rows.
        """
        try:
            frame = sent.arrived.result()
            taken = pass_from_wire(frame.header, frame.body)
            hidden = taken.padded(sent.batch)
        except BaseException:
            if sent.epoch == self._epoch:
                self._epoch = NEVER  # who knows what the stages hold
            raise
        if taken.full:  # all stages have repeated the changes
            raise AcceleratorFull(f"stage {len(taken.timings) + 1}: {taken.full}")
        spent_ns = sum(each.queue_ns + each.total_ns for each in taken.timings)
        network_ns = frame.arrived_ns - sent.began_ns - spent_ns
        self.last = StageTimes(taken.timings, max(0, network_ns), sent.began_ns)  # other clocks may be faster
        self.total += self.last
        return hidden

    def progress(self) -> int:
        """A counter that grows while the stages work; heartbeats and ANSWER_SECONDS find those that hang."""
        is_away = self._awaited is not None and not self._awaited.done()
        return int(time.monotonic()) if is_away else 0
