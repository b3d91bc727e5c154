"""Tree shapes that maximise expected tokens per round, given acceptance by depth and rank (`bough.trees.acceptance`).

The value f of a node is the product of the acceptances along its path, 1 at the root. The value of a tree is the sum
over its nodes: the expected tokens of a round. `nodes` and `levels` are limits that include the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bough.trees.acceptance import Acceptance, FloatArray, falling
from bough.trees.tree_plan import StaticShape

ROUNDING = 1e-13  # in expected tokens: rounding error of sums of values


def acceptance_below(acceptance: Acceptance, depth: int) -> FloatArray:
    """(num_ranks,) acceptance of the children of a node at `depth`."""
    row: FloatArray = acceptance[min(depth, len(acceptance) - 1)]
    return row


def node_values(shape: StaticShape, acceptance: Acceptance) -> FloatArray:
    """(num_nodes,) f of each node: the probability that it is accepted."""
    values, depths = np.ones(shape.budget), shape.depths()
    rank = 0
    for index, parent in enumerate(shape.parents):
        rank = rank + 1 if index and shape.parents[index - 1] == parent else 0
        row = acceptance_below(acceptance, depths[parent])
        values[index + 1] = values[parent] * row[rank] if rank < len(row) else 0.0
    return values


def expected_tokens(shape: StaticShape, acceptance: Acceptance) -> float:
    """Expected tokens of a round, the bonus token included (Sequoia, arXiv 2402.12374, proposition 3.4)."""
    return float(node_values(shape, acceptance).sum())


class BestChains(NamedTuple):
    """Independent paths, and their expected tokens."""

    num: int
    length: int
    expected_tokens: float


def expected_tokens_of_chains(num: int, length: int, acceptance: Acceptance) -> float:
    """Expected tokens of a round of k chains of length L.

    With one acceptance vector p for all depths this is 1 + (p1 + ... + pk) (1 - p1^L) / (1 - p1).
    """
    onwards = [acceptance_below(acceptance, depth)[0] for depth in range(1, length)]
    return 1 + float(acceptance[0, :num].sum()) * float(np.cumprod([1.0, *onwards]).sum())


def best_chains(acceptance: Acceptance, nodes: int, levels: int) -> BestChains:
    """The most valuable chains within `nodes` and `levels`, both at least 2."""
    lengths = range(1, min(levels, nodes))
    sizes = ((min((nodes - 1) // length, acceptance.shape[1]), length) for length in lengths)
    return max((BestChains(*s, expected_tokens_of_chains(*s, acceptance)) for s in sizes), key=lambda found: found[2])


def best_shape(acceptance: Acceptance, nodes: int, levels: int) -> StaticShape:
    """The most valuable shape within `nodes` and `levels`, without worthless nodes.

    Found by dynamic programming (Sequoia, arXiv 2402.12374, section 3.1).
    """
    tables = _tables(acceptance, nodes, levels)
    pairs: list[tuple[int, int]] = []  # (parent, rank), parents first
    waiting = [(0, 0, int(tables[0].best.argmax()))]  # (node, depth, size) of subtrees still to be laid out
    while waiting:
        parent, depth, size = waiting.pop()
        child_sizes = _split(tables, acceptance, depth, size)
        for rank, child_size in enumerate(child_sizes):
            pairs.append((parent, rank))
            waiting.append((len(pairs), depth + 1, child_size))
    return _shape(pairs)


class _Curve(NamedTuple):
    """Values of subtrees by number of nodes, from a least number on without gaps."""

    least: int
    values: FloatArray  # [i]: of least + i nodes
    slopes: FloatArray  # steps of a concave majorant that begins at the first value

    def table(self, nodes: int) -> FloatArray:
        """(nodes + 1,) [m]: value of m nodes; -inf if there is none."""
        values = np.full(nodes + 1, -np.inf)
        values[self.least : self.least + len(self.values)] = self.values
        return values

    def scaled(self, prob: float) -> _Curve:
        """The values as part of a parent's, which has such a child with this probability."""
        return _Curve(self.least, self.values * prob, self.slopes * prob)

    def majorant(self) -> FloatArray:
        """The concave majorant, of as many sizes as there are values."""
        majorant: FloatArray = np.concatenate((self.values[:1], self.slopes)).cumsum()
        return majorant


LEAF = _Curve(1, np.ones(1), np.empty(0))  # a root without children


class _SubtreeValues(NamedTuple):
    """Largest values of subtrees whose root is at one depth and counts 1; -inf if no such subtree exists."""

    values: FloatArray  # (most children + 1, nodes + 1) [b, m]: m nodes, b children of the root
    best: FloatArray  # (nodes + 1,) [m]: m nodes, any number of children
    curve: _Curve  # of `best`


def _tables(acceptance: Acceptance, nodes: int, levels: int) -> list[_SubtreeValues]:
    """A table for each depth: T[m][l][b] = max over y of T[y][l][b-1] + p[b] max_j T[m-y][l-1][j]."""
    tables = [_table([LEAF], nodes)]  # deepest first
    for depth in reversed(range(min(levels, nodes) - 1)):
        is_settled = len(tables) > 2 and np.array_equal(tables[-1].best, tables[-2].best)
        if is_settled and depth >= len(acceptance) - 1:  # deeper subtrees add nothing, so all further tables are equal
            tables.append(tables[-1])
        else:
            tables.append(_above(acceptance_below(acceptance, depth), tables[-1].curve, nodes))
    return tables[::-1]


def _above(row: FloatArray, below: _Curve, nodes: int) -> _SubtreeValues:
    """The table of a depth whose nodes' children have acceptance `row`, from subtrees one level deeper."""
    curves = [LEAF]
    for prob in row[: nodes - 1]:
        curves.append(_joined(curves[-1], below.scaled(prob), nodes))
    return _table(curves, nodes)


def _table(curves: Sequence[_Curve], nodes: int) -> _SubtreeValues:
    """The table of these numbers of children, from none on."""
    values = np.stack([curve.table(nodes) for curve in curves])
    best = values.max(axis=0)
    return _SubtreeValues(values, best, _curve(best[1 : 1 + np.isfinite(best).sum()]))


def _curve(values: FloatArray) -> _Curve:
    """The curve of these values of 1, 2, ... nodes, with its least concave majorant."""
    slopes = np.diff(values)
    if (np.diff(slopes) > ROUNDING).any():
        slopes = np.array(falling(slopes.tolist(), [1.0] * len(slopes)))
    return _Curve(1, values, slopes)


def _joined(first: _Curve, second: _Curve, nodes: int) -> _Curve:
    """The best values of subtrees of both curves together, with at most `nodes` nodes (max-plus convolution).

    If both curves are concave, the best split of any size takes their steepest slopes. Otherwise it is close to that:
    more distant splits are tried as long as the majorants allow a better value.
    """
    least = first.least + second.least
    slopes = np.concatenate((first.slopes, second.slopes))
    order = np.argsort(-slopes, kind="stable")[: nodes - least]
    splits = np.concatenate(([0], np.cumsum(order < len(first.slopes))))  # [i]: steps of `first` in the best i steps
    steps = np.arange(len(splits))
    values = first.values[splits] + second.values[steps - splits]
    most_first, most_second = first.majorant(), second.majorant()
    for direction in (1, -1):
        alive, moved = steps, splits
        while len(alive):
            moved = moved + direction
            others = alive - moved
            is_there = (moved >= 0) & (others >= 0) & (moved < len(first.values)) & (others < len(second.values))
            alive, moved, others = alive[is_there], moved[is_there], others[is_there]
            may_gain = most_first[moved] + most_second[others] > values[alive] + ROUNDING
            alive, moved, others = alive[may_gain], moved[may_gain], others[may_gain]
            values[alive] = np.maximum(values[alive], first.values[moved] + second.values[others])
    return _Curve(least, values, slopes[order])


def _scaled(values: FloatArray, prob: float) -> FloatArray:
    """values * prob, with -inf kept also at probability 0."""
    return np.where(np.isfinite(values), values, 0.0) * prob + np.where(np.isfinite(values), 0.0, -np.inf)


def _split(tables: Sequence[_SubtreeValues], acceptance: Acceptance, depth: int, size: int) -> list[int]:
    """Sizes of the root's child subtrees in the best subtree of `size` nodes at `depth`."""
    values, row = tables[depth].values, acceptance_below(acceptance, depth)
    sizes = []
    for num_children in range(int(values[:, size].argmax()), 0, -1):
        last = _scaled(tables[depth + 1].best[size:0:-1], row[num_children - 1])  # [y]: size - y nodes
        remaining = int((values[num_children - 1, :size] + last).argmax())
        sizes.append(size - remaining)
        size = remaining
    return sizes[::-1]


def _shape(pairs: Iterable[tuple[int, int]]) -> StaticShape:
    """The shape, level by level and siblings by rank, of (parent, rank) pairs for node 1 and on, parents first."""
    children: list[list[tuple[int, int]]] = [[]]
    for node, (parent, rank) in enumerate(pairs, start=1):
        children.append([])
        children[parent].append((rank, node))
    parents: list[int] = []
    order = [0]
    for place, node in enumerate(order):  # `order` grows during the loop
        for _, child in sorted(children[node]):
            parents.append(place)
            order.append(child)
    return StaticShape(tuple(parents))
