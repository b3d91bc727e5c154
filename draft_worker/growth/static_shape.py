"""Growing trees of a fixed shape: a level per draft step, filled with the best tokens or with samples.

A sampled tree is never trimmed by its samples' values, as verification would not be exact.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bough.errors import InvalidRequest
from bough.model.sampling.draft_sampler import generator, without_replacement
from bough.protocol.messages import GrowCall
from bough.trees.tree import DraftProbs, Tree, normalised
from bough.trees.tree_plan import BestFirst, StaticShape
from draft_worker.growth.grower import NO_NODES, BestFirstGrower, Candidates, Grower, GrowingTree

NUM_SHAPES = 64  # in the cache


def grower_for(call: GrowCall, max_children: int, vocab_size: int) -> Grower:
    """The grower for a call; in a best-first tree a node has at most `max_children` children.

    `vocab_size` is the draft's, used if the call does not give the target's. Raises InvalidRequest if the scheme cannot
    verify trees of this growth.
    """
    growth, scheme = call.plan.growth, call.plan.scheme
    stop_tokens = np.fromiter(call.sampling.stop_token_ids, np.int32)
    if isinstance(growth, BestFirst):
        if scheme.is_sampled and growth.budget > 1:
            raise InvalidRequest(
                "growth", f"must be a shape for scheme {scheme.value}, which draws nodes", "best_first"
            )
        return BestFirstGrower(call.root_token, growth, max_children, stop_tokens)
    sample = WithoutReplacement(call.sampling.seed, call.round, call.vocab_size or vocab_size)
    return ShapeGrower(call.root_token, Shape.of(growth), sample if scheme.is_sampled else Best(), stop_tokens)


class Shape:
    """The places of a static shape (Sequoia, arXiv 2402.12374, section 3.1), level by level; place 0 is the root's."""

    @classmethod
    @lru_cache(NUM_SHAPES)
    def of(cls, growth: StaticShape) -> Shape:
        """Cached, as the same few shapes are grown repeatedly."""
        return cls(np.asarray(growth.parents, np.int32))

    def __init__(self, parents: NDArray[np.int32]) -> None:
        """`parents` are those of place 1 and on."""
        self.parents = np.concatenate((np.full(1, -1, np.int32), parents))
        size = len(self.parents)
        self.depths = np.asarray(StaticShape(tuple(parents.tolist())).depths(), np.int32)
        self.num_children = np.bincount(self.parents[1:], minlength=size)
        first_child = np.searchsorted(self.parents, np.arange(size))  # parents ascend
        self.ranks = np.arange(size) - first_child[np.maximum(self.parents, 0)]  # among siblings


class Drawn(NamedTuple):
    """Children of several nodes, one row for each node."""

    tokens: NDArray[np.int32]  # (num_nodes, max_children)
    log_probs: NDArray[np.float32]  # the same shape
    counts: NDArray[np.intp]  # (num_nodes,) number of children in each row


class Best:
    """Children are the best tokens, in order."""

    is_sample = False

    def draw(self, level: int, candidates: Candidates, counts: NDArray[np.intp]) -> Drawn:
        """counts[i] children from row i of the candidates; fewer if fewer are possible."""
        return Drawn(*candidates, np.minimum(counts, np.isfinite(candidates.log_probs).sum(1)))


class WithoutReplacement:
    """Children are samples without replacement (Sequoia, section 3.2)."""

    is_sample = True  # the target must know the distributions that children were drawn from

    def __init__(self, seed: int, round_: int, vocab_size: int) -> None:
        self._seed, self._round, self._vocab_size = seed, round_, vocab_size

    def draw(self, level: int, candidates: Candidates, counts: NDArray[np.intp]) -> Drawn:
        """counts[i] children from row i of the candidates, in the order drawn."""
        rng = generator(self._seed, self._round, level)
        probs = normalised(weights_of(candidates))
        tokens = without_replacement(candidates.tokens, probs, int(counts.max()), self._vocab_size, rng)
        log_probs = log_probs_of(tokens, candidates.tokens, probs, self._vocab_size)
        return Drawn(tokens, log_probs, np.minimum(counts, tokens.shape[1]))


def weights_of(candidates: Candidates) -> NDArray[np.float32]:
    """Sampling weights (num_nodes, num_candidates); 0 for tokens that are not sampled."""
    weights: NDArray[np.float32] = np.exp(candidates.log_probs)
    return weights


def log_probs_of(
    drawn: NDArray[np.int32], tokens: NDArray[np.int32], probs: NDArray[np.float64], num_others: int
) -> NDArray[np.float32]:
    """Log-probabilities of drawn tokens; a token with probability 0 was drawn uniformly from `num_others` tokens."""
    drawn_probs = ((drawn[:, :, None] == tokens[:, None, :]) * probs[:, None, :]).sum(2)
    return np.minimum(np.log(np.where(drawn_probs > 0, drawn_probs, 1 / num_others)), 0.0).astype(np.float32)


class ShapeGrower:
    """Fills a shape, a level per step. Places below a token in `stop_tokens` stay empty."""

    def __init__(
        self, root_token: int, shape: Shape, fill: Best | WithoutReplacement, stop_tokens: NDArray[np.int32]
    ) -> None:
        self.tree = GrowingTree(root_token, len(shape.parents))
        self._shape, self._fill, self._stop_tokens = shape, fill, stop_tokens
        self._node_of = np.full(len(shape.parents), -1, np.int32)  # place -> node
        self._node_of[0] = 0
        self._level = 0
        self._sampled: list[tuple[NDArray[np.intp], Candidates]] = []  # by level: nodes, and their candidates

    def frontier(self) -> NDArray[np.intp]:
        """The nodes of a level that have children in the shape."""
        places = self._expanding()
        return np.unique(self._node_of[places]).astype(np.intp) if len(places) else NO_NODES

    def take(self, frontier: NDArray[np.intp], candidates: Candidates) -> None:
        """Fill the next level."""
        places = self._expanding()
        rows = np.searchsorted(frontier, self._node_of[places])
        chosen = Candidates(candidates.tokens[rows], candidates.log_probs[rows])
        drawn = self._fill.draw(self._level, chosen, self._shape.num_children[places])
        if self._fill.is_sample:
            self._sampled.append((frontier, candidates))
        self._level += 1
        below = np.flatnonzero(self._shape.depths == self._level)
        self._fill_places(below[np.isin(self._shape.parents[below], places)], places, drawn)

    def _fill_places(self, below: NDArray[np.intp], places: NDArray[np.intp], drawn: Drawn) -> None:
        """Place the children drawn for each of `places`, one row each."""
        rows, ranks = np.searchsorted(places, self._shape.parents[below]), self._shape.ranks[below]
        is_drawn = ranks < drawn.counts[rows]
        below, rows, ranks = below[is_drawn], rows[is_drawn], ranks[is_drawn]
        parents = self._node_of[self._shape.parents[below]].astype(np.intp)
        self._node_of[below] = self.tree.append(parents, drawn.tokens[rows, ranks], drawn.log_probs[rows, ranks])

    def finished(self) -> Tree:
        """The whole tree; a sampled one with the distributions it was sampled from."""
        tree = self.tree.tree()
        return replace(tree, draft_probs=self._draft_probs()) if self._fill.is_sample else tree

    def _draft_probs(self) -> DraftProbs:
        if not self._sampled:
            return DraftProbs.joined({})
        nodes, candidates = zip(*self._sampled, strict=True)
        tokens, log_probs = (np.concatenate(part) for part in zip(*candidates, strict=True))
        return DraftProbs.of_rows(np.concatenate(nodes), tokens, weights_of(Candidates(tokens, log_probs)))

    def _expanding(self) -> NDArray[np.intp]:
        """Places of the level whose nodes get children."""
        places = np.flatnonzero((self._shape.depths == self._level) & (self._shape.num_children > 0))
        nodes = self._node_of[places]
        return places[(nodes >= 0) & ~np.isin(self.tree.tokens[np.maximum(nodes, 0)], self._stop_tokens)]
