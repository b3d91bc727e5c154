"""Running calls to the draft and the target of a simulated world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import simpy
from numpy.typing import NDArray

from bough.protocol.messages import Verdict
from bough.simulation.law import Law
from bough.trees.tree import Tree
from draft_worker.growth.grower import BestFirstGrower, Candidates
from target_worker.verification.verify import walk

NO_TOKENS = np.zeros(0, np.int32)


@dataclass(slots=True)
class Growing:
    """A tree growing at the simulated draft, with the outcomes of its nodes."""

    law: Law
    seed: int
    root_position: int
    grower: BestFirstGrower
    done: simpy.Event
    arrived: float
    num_context: int
    num_passes: int = 0
    is_true: list[bool] = field(default_factory=lambda: [True])
    salts: list[int] = field(default_factory=lambda: [0])

    def step(self) -> None:
        """Expand the frontier."""
        self.num_passes += 1
        frontier, tree = self.grower.frontier(), self.grower.tree
        positions = self.root_position + tree.depths[frontier] + 1
        is_true = np.array([self.is_true[node] for node in frontier])
        salts = np.array([self.salts[node] for node in frontier], np.uint64)
        said = self.law.candidates(self.seed, is_true, positions, salts, tree.depths[frontier])
        first = tree.num_nodes
        self.grower.take(frontier, Candidates(said.tokens, said.log_probs))
        new = np.arange(first, tree.num_nodes)
        truth = self.law.truth(self.seed, self.root_position + tree.depths[new]) if len(new) else NO_TOKENS
        for node, true_token in zip(new.tolist(), truth.tolist(), strict=True):
            parent, token = int(tree.parents[node]), int(tree.tokens[node])
            self.is_true.append(self.is_true[parent] and token == true_token)
            self.salts.append((self.salts[parent] * 1_000_003 + token + 1) % 2**61)


@dataclass(frozen=True, slots=True)
class Sample:
    """A session: its acceptance law and its number of tokens."""

    name: str
    seed: int
    law: Law
    num_tokens: int
    prompt_tokens: int = 32


@dataclass(slots=True)
class Verifying:
    """A call waiting at the simulated target, with the interface of `target_worker.scheduler.batching`."""

    sample: Sample
    tree: Tree
    position: int  # of the root
    num_remaining: int  # context tokens still to compute
    may_leave_out: bool
    done: simpy.Event
    arrived: float
    kept: NDArray[np.intp] = field(default_factory=lambda: np.zeros(1, np.intp))  # nodes that are in the sweep
    num_sweeps_skipped: int = 0

    @property
    def num_nodes(self) -> int:
        return len(self.kept)

    def verdict(self) -> Verdict:
        """The verdict by the law's text, in node numbers of the whole tree."""

        def draw(path: Sequence[int]) -> int:
            return int(self.sample.law.truth(self.sample.seed, np.array([self.position + len(path)]))[0])

        verdict = walk(self.tree.only(self.kept), draw)
        return verdict._replace(accepted_nodes=tuple(self.kept[list(verdict.accepted_nodes)].tolist()))
