"""Counts which guesses were accepted, by depth and rank, so that shapes can follow the workload.

A rank is a place among siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from bough.trees.acceptance import FloatArray
from bough.trees.scheme_acceptance import DepthCounts, SchemeAcceptance
from bough.trees.tree import Tree
from bough.trees.tree_plan import Scheme

HALF_LIFE_ROUNDS = 512  # some thousand nodes are remembered: the first rank is then known to about 0.01
NUM_DEPTHS, NUM_RANKS = 64, 64  # limits of the table; deeper nodes count with the last depth


class AcceptanceCounter:
    """Acceptance counts of all sessions together, by scheme; older rounds weigh less."""

    def __init__(self, half_life_rounds: float = HALF_LIFE_ROUNDS) -> None:
        self._decay = 0.5 ** (1 / half_life_rounds)
        self._counts: dict[Scheme, FloatArray] = {}  # (2, NUM_DEPTHS, NUM_RANKS): accepted, rejected
        self._num_rounds: dict[Scheme, int] = {}

    def observe(self, scheme: Scheme, tree: Tree, accepted_nodes: Sequence[int]) -> None:
        """Count the children of the root and of every accepted node of a verdict."""
        if len(tree) == 1:
            return
        counts = self._counts.setdefault(scheme, np.zeros((2, NUM_DEPTHS, NUM_RANKS)))
        counts *= self._decay
        self._num_rounds[scheme] = self._num_rounds.get(scheme, 0) + 1
        for depth, (node, taken) in enumerate(zip_longest((0, *accepted_nodes), accepted_nodes)):
            children = tree.sampled_children(node, scheme)[:NUM_RANKS]
            if len(children):
                # Empty if all children were rejected, or the accepted one is beyond the table.
                ranks = np.flatnonzero(children == taken)
                outcome = (0, ranks[0]) if len(ranks) else (1, len(children) - 1)
                counts[outcome[0], min(depth, NUM_DEPTHS - 1), outcome[1]] += 1

    def counts(self) -> tuple[SchemeAcceptance, ...]:
        """Counts of every scheme in use, up to the largest counted depth and rank."""
        return tuple(
            SchemeAcceptance(scheme, self._num_rounds[scheme], _by_depth(counts))
            for scheme, counts in self._counts.items()
            if counts.any()
        )


def _by_depth(counts: FloatArray) -> tuple[DepthCounts, ...]:
    _, depths, ranks = np.nonzero(counts)
    accepted, rejected = counts[:, : depths.max() + 1, : ranks.max() + 1].tolist()
    return tuple(DepthCounts(tuple(a), tuple(r)) for a, r in zip(accepted, rejected, strict=True))
