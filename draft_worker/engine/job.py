"""One call's growing tree: its part of the next draft step, and its use of the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from bough.model.kv.slot import Segment
from bough.protocol.messages import GrowCall
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst
from draft_worker.candidates.candidates import Guessing, StepAnswer, TemperatureScalings
from draft_worker.engine.session import DraftSession
from draft_worker.expansions.expansion_cache import CachedGrowth, PendingExpansions
from draft_worker.growth.grower import Grower
from draft_worker.growth.static_shape import grower_for


class Stepping(Protocol):
    """A participant in draft steps."""

    session: DraftSession
    wanted: PendingExpansions | None  # nodes that the step expands, in the order of `segments`

    def advance(self) -> bool:
        """Continue as far as possible without the model; returns whether a step is needed."""

    def segments(self) -> list[Segment]:
        """Rows of the step."""

    def learn(self, answer: StepAnswer) -> None:
        """Store the step's answer about the wanted nodes."""


class DraftBackend(Protocol):
    """The interface below growing: a model, a simulated one, or a fake."""

    def ask(self, parts: Sequence[Stepping]) -> Sequence[StepAnswer]:
        """Run one draft step for all parts; the answers are valid until the next step."""


class GrowJob:
    """Grows the tree of one call."""

    def __init__(
        self,
        session: DraftSession,
        call: GrowCall,
        max_children: int,
        vocab_size: int,
        scalings: TemperatureScalings,
        arrived_ns: int,
    ) -> None:
        """Raises InvalidRequest or PrefixMissing."""
        self.session, self.call = session, call
        growth = call.plan.growth
        seconds = growth.seconds if isinstance(growth, BestFirst) else 0.0
        self._deadline_ns = arrived_ns + 1e9 * seconds if seconds else math.inf
        self.num_passes = 0
        self._new_grower = partial(grower_for, call, max_children, vocab_size)
        grower = self._new_grower()
        guessing = Guessing.of(call)
        session.stand_on(call, guessing, scalings.of(guessing))
        self._begin(grower)
        self.num_context = 0  # context tokens in the current step
        self.wanted: PendingExpansions | None = None

    def _begin(self, grower: Grower) -> None:
        self.session.grown = grower.tree
        self._walk = CachedGrowth(grower, self.session.explored)

    @property
    def num_warm(self) -> int:
        """Nodes of the tree that were in the expansion cache before the call."""
        return self._walk.num_warm

    def advance(self) -> bool:
        """Grow from the expansion cache; True if the model is needed and the time limit allows a step."""
        return self._walk.advance() and time.perf_counter_ns() < self._deadline_ns

    def segments(self) -> list[Segment]:
        """The context that is not cached yet, or a part of it, and then the frontier."""
        self.session.drop_partial()
        context = [self.session.pending()] if self.session.num_pending else []
        self.num_context = sum(map(len, context))
        if self.num_context < self.session.num_pending:
            self.wanted = None
            return context
        parents, tokens = self._walk.missing()
        if not self.session.has_rows(
            len(tokens)
        ):  # no room next to expansions that this tree does not need: start over
            self.session.forget_expansions()
            self._begin(self._new_grower())
            self._walk.advance()
            parents, tokens = self._walk.missing()
        self.wanted = self.session.explored.wanted(parents, tokens)
        return [*context, self.session.explored.segment(self.session.slot, self.wanted)]

    def learn(self, answer: StepAnswer) -> None:
        """Commit the context, and store the answer in the expansion cache."""
        self.num_passes += 1
        self.session.commit(self.num_context)
        if self.wanted is not None:
            self.session.learn(self.wanted, answer)

    def step_figures(self) -> dict[str, int]:
        """Span attributes: the call's own share of the last step."""
        num_expanded = len(self.wanted.tokens) if self.wanted is not None else 0
        return {"bough.step.context_tokens": self.num_context, "bough.step.expanded_nodes": num_expanded}

    def tree(self) -> Tree:
        """The tree, once `advance` has returned False."""
        return self._walk.grower.finished()
