"""Draft-ahead: finding out, while the target verifies a tree, what the session's next call is likely to ask for.

An outcome of verification is a path of the tree and a bonus token below it that it does not hold. The trees of the
likeliest outcomes are grown beforehand, in the same way as they will be; all that remains of it is what was explored.
The next call grows from nothing as ever, only that the model need not be asked for what is known: its tree is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from bough.model.kv.segment import Segment
from bough.protocol.messages import GrowCall
from bough.trees.tree import Tree
from draft_worker.candidates.candidates import Answer
from draft_worker.engine.session import DraftSession
from draft_worker.expansions.cached_growth import CachedGrowth
from draft_worker.expansions.expansion_cache import PendingExpansions
from draft_worker.growth.grower import Grower

NUM_STEPS = 64  # by default, where nobody else wants the device
NUM_OUTCOMES = 32  # that are looked at
MAX_ROWS = 32  # of one draft step: a call that comes waits for it

Place = tuple[int, int]  # expansion of the parent, token


def num_steps(setting: int, device_type: str) -> int:
    """Most steps between two calls of a session: as set, and where it is not set (-1) none beside others on a CPU."""
    if setting >= 0:
        return setting
    return 0 if device_type == "cpu" else NUM_STEPS


class DraftAhead:
    """Explores below and beside a tree that has been sent, the likeliest first."""

    def __init__(
        self,
        session: DraftSession,
        call: GrowCall,
        tree: Tree,
        next_grower: Callable[[int, int], Grower],
        max_steps: int,
    ) -> None:
        """For a call whose tree this was.

        `next_grower` is what the next call will grow with, given its root token and how many nodes were accepted above.
        """
        self.session = session
        self._next_grower, self._tree = next_grower, tree
        self._closed = np.fromiter(call.sampling.stop_token_ids, np.int32)
        self._scores = tree.scores()
        self._num_steps_left = max_steps
        self._walks: dict[Place, CachedGrowth] = {}
        self.wanted: PendingExpansions | None = None

    def advance(self) -> bool:
        """Chooses what to find out next; whether there is anything, and a step for it."""
        if self._num_steps_left == 0 or not self.session.has_rows(MAX_ROWS):
            return False
        places = self._choose(self._options())
        if not places:
            return False
        parents, tokens = np.ascontiguousarray(np.array(places, np.int32).T)
        self.wanted = self.session.explored.wanted(parents, tokens)
        return True

    def segments(self) -> list[Segment]:
        """The rows of a step."""
        assert self.wanted is not None
        return [self.session.explored.segment(self.session.slot, self.wanted)]

    def learn(self, answer: Answer) -> None:
        """Puts what may follow where the next call finds it."""
        assert self.wanted is not None
        self._num_steps_left -= 1
        self.session.learn(self.wanted, answer)

    def _options(self) -> list[tuple[float, list[Place]]]:
        """What could be expanded, each with a logarithm of its worth: chance to be asked for, per row of a step.

        A leaf of the tree opens outcomes below it; what an outcome's growth misses is a step that the next call saves.
        """
        expansions = self.session.explored.find_tree(self._tree.parents, self._tree.tokens)
        is_closed = np.isin(self._tree.tokens, self._closed)
        options: list[tuple[float, list[Place]]] = []
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
    def _choose(options: list[tuple[float, list[Place]]]) -> list[Place]:
        """The most worth within a step's rows; an outcome's step by halves would be worth nothing."""
        chosen: dict[Place, None] = {}
        for _, places in sorted(options, key=lambda option: -option[0]):
            new = dict.fromkeys(place for place in places if place not in chosen)
            if not chosen or len(chosen) + len(new) <= MAX_ROWS:
                chosen |= new
        return list(chosen)[:MAX_ROWS]

    def _outcomes(self, expansions: NDArray[np.int32]) -> Iterator[tuple[float, Place]]:
        """Bonus tokens below nodes that have been expanded, likeliest first, with the log-probability of the path."""
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
    """As log-probabilities, row by row: what is sampled from has weights instead. A row of -inf stays as it is."""
    most = np.maximum(log_weights.max(1, keepdims=True, initial=-np.inf), np.finfo(np.float32).min)
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(log_weights - most).sum(1, keepdims=True))
    normalised: NDArray[np.float32] = np.where(np.isfinite(log_weights), log_weights - most - total, -np.inf)
    return normalised
