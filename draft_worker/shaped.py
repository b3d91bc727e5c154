"""Growing trees whose shape is settled beforehand: a level per draft step, filled with the best tokens or with samples.

A sampled tree is never cut by what its samples turned out to be: the schemes that verify it would not be exact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bough.draft_probs import DraftProbs, normalised
from bough.errors import InvalidRequest
from bough.growth import BestFirst, Chains, Scheme, StaticShape
from bough.messages import GrowCall
from bough.model.sample import Purpose, generator, independently, without_replacement
from bough.tree import Tree
from draft_worker.grow import NO_NODES, BestFirstGrower, Candidates, Grower, GrowingTree


def grower_for(call: GrowCall, branch: int, vocab_size: int) -> Grower:
    """Grows what a call asks for; in a best-first tree a node has at most `branch` children.

    Raises:
        InvalidRequest: a growth that the scheme cannot verify.
    """
    growth, scheme = call.plan.growth, call.plan.scheme
    closed = np.fromiter(call.sampling.stop_token_ids, np.int32)
    if isinstance(growth, BestFirst):
        if scheme is not Scheme.TARGET and growth.budget > 1:
            raise InvalidRequest(
                f"growth: best_first chooses nodes by their probability, which scheme {scheme.value} does not allow; "
                "shape or chains would do"
            )
        return BestFirstGrower(call.root_token, growth, branch, closed)
    shape = Shape(chain_parents(growth) if isinstance(growth, Chains) else np.asarray(growth.parents, np.int32))
    fills: dict[Scheme, Fill] = {
        Scheme.TARGET: Best(),
        Scheme.WITHOUT_REPLACEMENT: WithoutReplacement(call.sampling.seed, call.round, vocab_size),
        Scheme.MULTI_ROUND: Independent(call.sampling.seed, call.round),
    }
    return ShapeGrower(call.root_token, shape, fills[scheme], closed)


def chain_parents(chains: Chains) -> NDArray[np.int32]:
    """Chains as a shape: the root has `num` children, and each node below it one."""
    first = np.zeros(chains.num, np.int32)
    rest = np.arange(1, chains.num * (chains.length - 1) + 1, dtype=np.int32)
    return np.concatenate((first, rest))


class Shape:
    """The places of a static shape (Sequoia, arXiv 2402.12374, section 3.1), level by level; place 0 is the root's."""

    def __init__(self, parents: NDArray[np.int32]) -> None:
        """`parents` of place 1 and on."""
        self.parents = np.concatenate((np.full(1, -1, np.int32), parents))
        size = len(self.parents)
        self.depths = np.asarray(StaticShape(tuple(parents.tolist())).depths(), np.int32)
        self.num_children = np.bincount(self.parents[1:], minlength=size)
        first_child = np.searchsorted(self.parents, np.arange(size))  # parents ascend
        self.ranks = np.arange(size) - first_child[np.maximum(self.parents, 0)]  # among siblings


class Fill(Protocol):
    """Where the tokens come from that fill a shape."""

    is_sample: bool  # the target must be told what the children were drawn from
    may_repeat: bool  # and in which order, and how often

    def draw(self, level: int, candidates: Candidates, counts: NDArray[np.intp]) -> list[Drawn]:
        """Children for the nodes of a level; row i of the candidates is asked for counts[i] of them."""
        ...


Drawn = tuple[NDArray[np.int32], NDArray[np.float32]]  # tokens and log-probabilities of one node's children


class Best:
    """The best tokens in their order."""

    is_sample, may_repeat = False, False

    def draw(self, level: int, candidates: Candidates, counts: NDArray[np.intp]) -> list[Drawn]:
        """Fewer where no more have a chance."""
        num_possible = np.isfinite(candidates.log_probs).sum(1)
        return [
            (candidates.tokens[row, :count], candidates.log_probs[row, :count])
            for row, count in enumerate(np.minimum(counts, num_possible).tolist())
        ]


class WithoutReplacement:
    """Samples that differ from one another (Sequoia, section 3.2)."""

    is_sample, may_repeat = True, False

    def __init__(self, seed: int, round_: int, vocab_size: int) -> None:
        self._seed, self._round, self._vocab_size = seed, round_, vocab_size

    def draw(self, level: int, candidates: Candidates, counts: NDArray[np.intp]) -> list[Drawn]:
        """In the order drawn."""
        rng = generator(self._seed, Purpose.DRAFT, self._round, level)
        drawn: list[Drawn] = []
        for row, count in enumerate(counts.tolist()):
            tokens, probs = sampled_from(candidates, row)
            new = without_replacement(tokens, probs, count, self._vocab_size, rng)
            drawn.append((new, log_probs_of(new, tokens, probs, self._vocab_size)))
        return drawn


class Independent:
    """Samples that may repeat (SpecInfer, arXiv 2305.09781)."""

    is_sample, may_repeat = True, True

    def __init__(self, seed: int, round_: int) -> None:
        self._seed, self._round = seed, round_

    def draw(self, level: int, candidates: Candidates, counts: NDArray[np.intp]) -> list[Drawn]:
        """In the order drawn."""
        rng = generator(self._seed, Purpose.DRAFT, self._round, level)
        drawn: list[Drawn] = []
        for row, count in enumerate(counts.tolist()):
            tokens, probs = sampled_from(candidates, row)
            new = independently(tokens, probs, count, rng)
            drawn.append((new, log_probs_of(new, tokens, probs, len(tokens))))
        return drawn


def sampled_from(candidates: Candidates, row: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Tokens and probabilities as `DraftProbs.of` will have them."""
    tokens, weights = weights_of(candidates, row)
    return tokens, normalised(weights)


def weights_of(candidates: Candidates, row: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Tokens that can be sampled, and their weights."""
    weights = np.exp(candidates.log_probs[row])
    is_possible = weights > 0
    return candidates.tokens[row][is_possible], weights[is_possible]


def log_probs_of(
    drawn: NDArray[np.int32], tokens: NDArray[np.int32], probs: NDArray[np.float64], num_others: int
) -> NDArray[np.float32]:
    """Of drawn tokens; one that has no probability was drawn from `num_others` that were all alike."""
    known = dict(zip(tokens.tolist(), probs.tolist(), strict=True))
    drawn_probs = [known.get(token, 1 / num_others) for token in drawn.tolist()]
    return np.minimum(np.log(drawn_probs), 0.0).astype(np.float32)


class ShapeGrower:
    """Fills a shape, a level per step. Below a token in `closed` its places stay empty."""

    def __init__(self, root_token: int, shape: Shape, fill: Fill, closed: NDArray[np.int32]) -> None:
        self.tree = GrowingTree(root_token, len(shape.parents))
        self._shape, self._fill, self._closed = shape, fill, closed
        self._node_of = np.full(len(shape.parents), -1, np.int32)  # place -> node; of several places where they merged
        self._node_of[0] = 0
        self._level = 0
        self._draws: list[int] = []
        self._weights: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}  # expanded node -> as sampled

    def frontier(self) -> NDArray[np.intp]:
        """The nodes of a level that have children in the shape."""
        places = self._expanding()
        return np.unique(self._node_of[places]).astype(np.intp) if len(places) else NO_NODES

    def take(self, frontier: NDArray[np.intp], candidates: Candidates) -> None:
        """Fills the next level."""
        places = self._expanding()
        rows = np.searchsorted(frontier, self._node_of[places])
        counts = self._shape.num_children[places]
        chosen = Candidates(candidates.tokens[rows], candidates.log_probs[rows])
        drawn = self._fill.draw(self._level, chosen, counts)
        if self._fill.is_sample:
            self._weights.update((int(node), weights_of(candidates, row)) for row, node in enumerate(frontier))
        self._level += 1
        below = np.flatnonzero(self._shape.depths == self._level)
        below = below[np.isin(self._shape.parents[below], places)]
        self._fill_places(below, dict(zip(places.tolist(), drawn, strict=True)))

    def _fill_places(self, places: NDArray[np.intp], drawn: dict[int, Drawn]) -> None:
        """Samples that may repeat share a node where they did."""
        children: dict[tuple[int, int], int] = {}  # parent and token -> node
        log_probs: list[float] = []
        for place in places.tolist():
            tokens, of_tokens = drawn[int(self._shape.parents[place])]
            rank = int(self._shape.ranks[place])
            if rank < len(tokens):
                key = (int(self._node_of[self._shape.parents[place]]), int(tokens[rank]))
                if key not in children:
                    children[key] = self.tree.num_nodes + len(children)
                    log_probs.append(float(of_tokens[rank]))
                self._node_of[place] = children[key]
                self._draws.append(children[key])
        parents, new_tokens = np.array(list(children), np.int32).reshape(-1, 2).T
        self.tree.append(parents.astype(np.intp), new_tokens, np.asarray(log_probs, np.float32))

    def finished(self) -> Tree:
        """All of it; a sampled tree with what it was sampled from."""
        tree = self.tree.tree()
        if not self._fill.is_sample:
            return tree
        draws = np.asarray(self._draws, np.int32) if self._fill.may_repeat else None
        return replace(tree, draft_probs=DraftProbs.joined(self._weights), draws=draws)

    def _expanding(self) -> NDArray[np.intp]:
        """Places of the level whose nodes are to get children."""
        places = np.flatnonzero((self._shape.depths == self._level) & (self._shape.num_children > 0))
        nodes = self._node_of[places]
        return places[(nodes >= 0) & ~np.isin(self.tree.tokens[np.maximum(nodes, 0)], self._closed)]
