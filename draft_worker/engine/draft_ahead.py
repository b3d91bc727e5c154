"""Draft-ahead: while the target verifies a tree, run the draft on nodes that the session's next call will likely need.

An outcome of verification is a path of the tree and a bonus token that is not in the tree. The trees of the likeliest
outcomes are grown in advance, and only their expansions are cached. The next call grows its tree as usual, without
running the model for cached expansions: the tree is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from bough.model.kv.slot import Segment
from bough.protocol.messages import GrowCall
from bough.trees.tree import Tree
from draft_worker.candidates.candidates import StepAnswer
from draft_worker.engine.session import DraftSession
from draft_worker.expansions.expansion_cache import CachedGrowth, PendingExpansions
from draft_worker.growth.grower import Grower

NUM_STEPS = 64  # default limit of steps if the device is not shared
NUM_OUTCOMES = 32  # limit of outcomes for which trees are grown
MAX_ROWS = 32  # of one draft step: a new call waits until it ends

ChildKey = tuple[int, int]  # (expansion of the parent, token)


def num_steps(setting: int, device_type: str) -> int:
    """Limit of steps between two calls of a session; -1 is the default, which is 0 on a CPU shared with others."""
    if setting >= 0:
        return setting
    return 0 if device_type == "cpu" else NUM_STEPS


class DraftAhead:
    """Expands nodes below a sent tree and next to its nodes, the likeliest first."""

    def __init__(
        self,
        session: DraftSession,
        call: GrowCall,
        tree: Tree,
        next_grower: Callable[[int, int], Grower],
        max_steps: int,
    ) -> None:
        """`tree` is the answer to `call`.

        `next_grower` makes the next call's grower from its root token and the number of nodes accepted above the root.
        """
        self.session = session
        self._next_grower, self._tree = next_grower, tree
        self._closed = np.fromiter(call.sampling.stop_token_ids, np.int32)
        self._scores = tree.scores()
        self._num_steps_left = max_steps
        self._walks: dict[ChildKey, CachedGrowth] = {}
        self.wanted: PendingExpansions | None = None

    def advance(self) -> bool:
        """Choose nodes to expand next; False if there are none, or no steps are left."""
        if self._num_steps_left == 0 or not self.session.has_rows(MAX_ROWS):
            return False
        places = self._choose(self._options())
        if not places:
            return False
        parents, tokens = np.ascontiguousarray(np.array(places, np.int32).T)
        self.wanted = self.session.explored.wanted(parents, tokens)
        return True

    def segments(self) -> list[Segment]:
        assert self.wanted is not None
        return [self.session.explored.segment(self.session.slot, self.wanted)]

    def learn(self, answer: StepAnswer) -> None:
        assert self.wanted is not None
        self._num_steps_left -= 1
        self.session.learn(self.wanted, answer)

    def _options(self) -> list[tuple[float, list[ChildKey]]]:
        """Sets of places to expand, each with the logarithm of its probability of use per row of a step.

        Expanding a leaf of the tree gives outcomes below it. Expanding a missing node of an outcome's tree saves a step
        later.
        """
        expansions = self.session.explored.find_tree(self._tree.parents, self._tree.tokens)
        is_closed = np.isin(self._tree.tokens, self._closed)
        options: list[tuple[float, list[ChildKey]]] = []
        for leaf in np.flatnonzero((expansions < 0) & ~is_closed).tolist():
            place = (int(expansions[self._tree.parents[leaf]]), int(self._tree.tokens[leaf]))
            options.append((float(self._scores[leaf]), [place]))
        num_growing = 0
        for score, place in self._outcomes(expansions):
            if place not in self._walks:
                num_accepted = int(self.session.explored.depths[place[0]])
                self._walks[place] = CachedGrowth(
                    self._next_grower(place[1], num_accepted), self.session.explored, place[0]
                )
            if self._walks[place].advance():
                parents, tokens = self._walks[place].missing()
                missing = list(zip(parents.tolist(), tokens.tolist(), strict=True))
                options.append((score - math.log(len(missing)), missing))
                num_growing += 1
            if num_growing == NUM_OUTCOMES:
                break
        return options

    @staticmethod
    def _choose(options: list[tuple[float, list[ChildKey]]]) -> list[ChildKey]:
        """The most valuable sets that fit one step; a part of an outcome's step would save nothing."""
        chosen: dict[ChildKey, None] = {}
        for _, places in sorted(options, key=lambda option: -option[0]):
            new = dict.fromkeys(place for place in places if place not in chosen)
            if not chosen or len(chosen) + len(new) <= MAX_ROWS:
                chosen |= new
        return list(chosen)[:MAX_ROWS]

    def _outcomes(self, expansions: NDArray[np.int32]) -> Iterator[tuple[float, ChildKey]]:
        """Bonus tokens below expanded nodes, likeliest first, each with the log-probability of its path."""
        nodes = np.flatnonzero(expansions >= 0)
        following = self.session.explored.following(expansions[nodes])
        scores = self._scores[nodes][:, None] + _normalised(following.log_probs)
        order = np.argsort(-scores, axis=None, kind="stable")[: len(self._tree) + len(self._walks) + NUM_OUTCOMES]
        in_tree = {*zip(self._tree.parents.tolist(), self._tree.tokens.tolist(), strict=True)}
        for row, rank in zip(*np.unravel_index(order, scores.shape), strict=True):
            token = int(following.tokens[row, rank])
            if np.isfinite(scores[row, rank]) and (int(nodes[row]), token) not in in_tree and token not in self._closed:
                yield float(scores[row, rank]), (int(expansions[nodes[row]]), token)


def _normalised(log_weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-probabilities from log-weights, row by row; sampled schemes store weights. Rows of -inf stay."""
    most = np.maximum(log_weights.max(1, keepdims=True, initial=-np.inf), np.finfo(np.float32).min)
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(log_weights - most).sum(1, keepdims=True))
    normalised: NDArray[np.float32] = np.where(np.isfinite(log_weights), log_weights - most - total, -np.inf)
    return normalised
