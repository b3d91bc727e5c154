"""The texts of sessions in a `World`: the guesses of simulated drafts, and the true tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bough.protocol.messages import Verdict
from bough.simulation.text_model import TextModel
from bough.trees.tree import Tree, along_paths
from bough.trees.tree_plan import BestFirst
from draft_worker.growth.grower import BestFirstGrower, Candidates
from target_worker.verification.verify import walk

BRANCH = 16  # most children of a node, the draft workers' default
POOLED_NODES = 4096  # nodes of all trees grown in one way, within the next numbers
LEAST_POOLED, MOST_POOLED = 32, 128  # trees grown in one way
MOST_TREES = 4096  # kept
DRIFT_STEPS = 16  # places of a drift at which trees differ
OTHER_TOKEN = 1 << 20  # a token that no draft guesses
NO_TOKENS = np.zeros(0, np.int32)

Nodes = NDArray[np.intp]


class Grown(NamedTuple):
    """A tree, and the rows of each draft step that grew it."""

    tree: Tree
    rows: tuple[int, ...]


class Text(Protocol):
    """The text of one session."""

    def root(self, position: int) -> int:
        """The token at the position of a tree's root."""

    def grow(self, position: int, growth: BestFirst) -> Grown:
        """A tree below the root at this position."""

    def verdict(self, position: int, tree: Tree) -> Verdict:
        """The verdict on a part of the last tree grown at this position, or on a root alone."""


def _grown(
    root: int, growth: BestFirst, candidates: Callable[[BestFirstGrower, Nodes], Candidates]
) -> tuple[BestFirstGrower, tuple[int, ...]]:
    """Grow a tree; returns its grower, which is finished, and the rows of each step."""
    grower = BestFirstGrower(root, growth, BRANCH, NO_TOKENS)
    rows = []
    while len(frontier := grower.frontier()):
        rows.append(len(frontier))
        grower.take(frontier, candidates(grower, frontier))
    return grower, tuple(rows)


class SeededText:
    """A text that is a function of model and seed, independent of guesses."""

    def __init__(self, model: TextModel, seed: int) -> None:
        self._model, self._seed = model, seed

    def root(self, position: int) -> int:
        return int(self._model.truth(self._seed, np.array([position]))[0])

    def grow(self, position: int, growth: BestFirst) -> Grown:
        is_true, salts = [True], [0]

        def candidates(grower: BestFirstGrower, frontier: Nodes) -> Candidates:
            tree = grower.tree
            new = range(len(is_true), tree.num_nodes)
            truth = self._model.truth(self._seed, position + tree.depths[new.start : new.stop]).tolist() if new else []
            for node, true_token in zip(new, truth, strict=True):
                parent, token = int(tree.parents[node]), int(tree.tokens[node])
                is_true.append(is_true[parent] and token == true_token)
                salts.append((salts[parent] * 1_000_003 + token + 1) % 2**61)
            depths = tree.depths[frontier]
            on_path = np.array([is_true[node] for node in frontier])
            own = np.array([salts[node] for node in frontier], np.uint64)
            said = self._model.candidates(self._seed, on_path, position + depths + 1, own, depths)
            return Candidates(said.tokens, said.log_probs)

        grower, rows = _grown(self.root(position), growth, candidates)
        return Grown(grower.finished(), rows)

    def verdict(self, position: int, tree: Tree) -> Verdict:
        return walk(tree, lambda path: self.root(position + len(path)))


class _Chances:
    """The probability of each node of a tree that it follows its parent; nodes are numbered in order of discovery."""

    def __init__(self, parents: NDArray[np.int32], probs: NDArray[np.float64]) -> None:
        self.probs = probs
        self._parents = parents
        self._children: dict[int, tuple[Nodes, NDArray[np.float64]]] = {}

    def following(self, node: int, uniform: float) -> int:
        """The child that follows a node, or OTHER_TOKEN."""
        if node not in self._children:
            children = np.flatnonzero(self._parents == node)
            self._children[node] = children, self.probs[children].cumsum()
        children, reached = self._children[node]
        place = int(reached.searchsorted(uniform, side="right"))
        return int(children[place]) if place < len(children) else OTHER_TOKEN


class PooledText:
    """A text that shares trees with others, as growing each one would take most of a simulation's time.

    Sizes are rounded down by at most an eighth, and several trees of each size are grown. Their tokens are ranks among
    siblings; the true ones are drawn whenever a tree is used.
    """

    def __init__(self, model: TextModel, random: Random) -> None:
        self._model, self._random = model, random
        self._chances: _Chances | None = None

    def root(self, position: int) -> int:
        return 0

    def grow(self, position: int, growth: BestFirst) -> Grown:
        acceptance, growth = self._model.acceptance, _rounded(growth)
        step = max(1, acceptance.over_positions // DRIFT_STEPS)
        place = min(position, acceptance.over_positions) // step * step if acceptance.last_rows else 0
        number = self._random.randrange(max(LEAST_POOLED, min(MOST_POOLED, POOLED_NODES // growth.budget)))
        grown, self._chances = _pooled(self._model, place, growth, number)
        return grown

    def verdict(self, position: int, tree: Tree) -> Verdict:
        chances, self._chances = self._chances, None
        if chances is None:
            return Verdict((), OTHER_TOKEN)
        return walk(tree, lambda path: chances.following(int(tree.tokens[path[-1]]), self._random.random()))


@lru_cache(MOST_TREES)
def _pooled(model: TextModel, position: int, growth: BestFirst, number: int) -> tuple[Grown, _Chances]:
    """One of the trees grown this way below a root at this position, the same in every process."""
    levels = np.random.default_rng(number)
    probs = np.zeros(1 + growth.depth * growth.budget)

    def candidates(grower: BestFirstGrower, frontier: Nodes) -> Candidates:
        depths = grower.tree.depths[frontier]
        keys = levels.integers(0, 2**64, len(frontier), np.uint64)
        true_probs, stated = model.chances(keys, position + depths + 1, depths)
        expanded.append((grower.tree.num_nodes, frontier, true_probs))
        return Candidates(np.broadcast_to(np.arange(stated.shape[1], dtype=np.int32), stated.shape), stated)

    expanded: list[
        tuple[int, Nodes, NDArray[np.float64]]
    ] = []  # first child of each step, its frontier, and the candidates
    grower, rows = _grown(0, growth, candidates)
    tree = grower.tree
    ends = [*(first for first, _, _ in expanded[1:]), tree.num_nodes]
    for (first, frontier, true_probs), end in zip(expanded, ends, strict=True):  # tokens are ranks among siblings
        new = slice(first, end)
        probs[new] = true_probs[np.searchsorted(frontier, tree.parents[new]), tree.tokens[new]]
    tree.tokens[: tree.num_nodes] = np.arange(tree.num_nodes)
    chances = _Chances(tree.parents[: tree.num_nodes].copy(), probs[: tree.num_nodes])
    return Grown(grower.finished(), rows), chances


def expected_tokens(model: TextModel, growth: BestFirst) -> float:
    """Mean tokens of a round with such a tree, bonus token included; over some trees, but all outcomes."""
    tokens = []
    for number in range(LEAST_POOLED):
        grown, chances = _pooled(model, 0, growth, number)
        probs = chances.probs[grown.tree.tokens]
        probs[0] = 1.0
        tokens.append(float(along_paths(np.multiply, probs, grown.tree.ancestors()).sum()))
    return sum(tokens) / len(tokens)


def _rounded(growth: BestFirst) -> BestFirst:
    """A growth with its size rounded to steps of an eighth, and its price to steps of a fifth."""
    budget, width = _eighths(growth.budget), _eighths(growth.width)
    min_gain = float(np.exp2(np.round(4 * np.log2(growth.min_gain)) / 4)) if growth.min_gain else 0.0
    return growth._replace(budget=budget, width=width, min_gain=min_gain, seconds=0.0)


def _eighths(number: int) -> int:
    """A whole number, rounded down to four binary digits."""
    step = 1 << max(0, number.bit_length() - 4)
    return number // step * step
