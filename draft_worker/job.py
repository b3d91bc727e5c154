"""One call's tree while it grows: what it wants of the next draft step, and what it makes of the answer."""

from __future__ import annotations

import math
import time
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bough.growth import BestFirst
from bough.messages import GrowCall
from bough.model.batch import Segment
from bough.tree import Tree
from draft_worker.explored import Wanted
from draft_worker.guess import Guessing
from draft_worker.session import DraftSession
from draft_worker.shaped import grower_for
from draft_worker.sharpness import Sharpnesses
from draft_worker.walk import Walk


class Stepping(Protocol):
    """Whatever takes part in a draft step."""

    session: DraftSession

    def advance(self) -> bool:
        """Goes on as far as it can without the model; whether it wants a step of it."""
        ...

    def segments(self) -> list[Segment]:
        """Its rows of the step."""
        ...

    def adjust(self, logits: torch.Tensor) -> None:
        """Makes the logits of its rows, (num_rows, vocab_size), what sampling parameters have of them."""
        ...

    def learn(self, values: NDArray[np.float32], tokens: NDArray[np.int32], vocab_size: int) -> None:
        """The step has been run; the largest logits of its rows, as from `draft_worker.top.largest`."""
        ...


class Job:
    """Grows the tree of one call."""

    def __init__(
        self,
        session: DraftSession,
        call: GrowCall,
        branch: int,
        vocab_size: int,
        sharpnesses: Sharpnesses,
        arrived_ns: int,
    ) -> None:
        """Raises InvalidRequest or PrefixMissing."""
        self.session, self.call = session, call
        growth = call.plan.growth
        seconds = growth.seconds if isinstance(growth, BestFirst) else 0.0
        self._deadline_ns = arrived_ns + 1e9 * seconds if seconds else math.inf
        self.num_passes = 0
        grower = grower_for(call, branch, vocab_size)
        guessing = Guessing.of(call)
        session.stand_on(call, guessing, sharpnesses.of(guessing))
        session.grown = grower.tree
        self._walk = Walk(grower, session.explored)
        self._num_context = 0  # pending tokens in this step
        self._wanted: Wanted | None = None

    @property
    def num_warm(self) -> int:
        """Nodes expanded for this tree that had been before it was asked for."""
        return self._walk.num_warm

    def advance(self) -> bool:
        """As far as what is explored reaches; more only while there is time."""
        return self._walk.advance() and time.perf_counter_ns() < self._deadline_ns

    def segments(self) -> list[Segment]:
        """The context that is not held yet, or a part of it, and then the frontier."""
        context = [self.session.pending()] if self.session.num_pending else []
        self._num_context = sum(map(len, context))
        if self._num_context < self.session.num_pending:
            self._wanted = None
            return context
        self._wanted = self.session.explored.wanted(*self._walk.missing())
        return [*context, self.session.explored.segment(self.session.slot, self._wanted)]

    def adjust(self, logits: torch.Tensor) -> None:
        """By penalties and bias."""
        if self._wanted is not None:
            self.session.adjust(self._wanted, logits)

    def learn(self, values: NDArray[np.float32], tokens: NDArray[np.int32], vocab_size: int) -> None:
        """Commits the context and puts what may follow where `advance` finds it."""
        self.num_passes += 1
        self.session.commit(self._num_context)
        if self._wanted is not None:
            self.session.learn(self._wanted, values, tokens, vocab_size)

    def tree(self) -> Tree:
        """The tree, when `advance` wants no more."""
        return self._walk.grower.finished()
