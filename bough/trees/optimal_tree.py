"""Tree shapes that maximise expected tokens per round, given acceptance by depth and rank (`bough.trees.acceptance`).

The value f of a node is the product of the acceptances along its path, 1 at the root. The value of a tree is the sum
over its nodes: the expected tokens of a round. `nodes` and `levels` are limits that include the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bough.trees.acceptance import Acceptance, FloatArray
from bough.trees.tree_plan import StaticShape

BLOCK_ROWS = 64  # rows of `_best_splits` computed at once, to stay in the processor's cache


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
    """Independent paths, and what they are worth."""

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


class _Table(NamedTuple):
    """Largest values of subtrees whose root is at one depth and counts 1; -inf where no such subtree exists."""

    values: FloatArray  # (num_ranks + 1, nodes + 1) [b, m]: m nodes, b children of the root
    best: FloatArray  # (nodes + 1,) [m]: m nodes, any number of children


def _tables(acceptance: Acceptance, nodes: int, levels: int) -> list[_Table]:
    """A table for each depth: T[m][l][b] = max over y of T[y][l][b-1] + p[b] max_j T[m-y][l-1][j]."""
    leaf = _leaf(nodes)
    tables = [_Table(leaf[None], leaf)]  # deepest first
    for depth in reversed(range(min(levels, nodes) - 1)):
        is_settled = len(tables) > 2 and np.array_equal(tables[-1].best, tables[-2].best)
        if is_settled and depth >= len(acceptance) - 1:  # deeper subtrees add nothing, so all further tables are equal
            tables.append(tables[-1])
        else:
            tables.append(_above(acceptance_below(acceptance, depth), tables[-1]))
    return tables[::-1]


def _above(row: FloatArray, below: _Table) -> _Table:
    """The table of a depth whose nodes' children have acceptance `row`, from the table one level deeper."""
    values = [_leaf(len(below.best) - 1)]
    for prob in row:
        values.append(_best_splits(values[-1], _scaled(below.best, prob)))
    stacked = np.stack(values)
    return _Table(stacked, stacked.max(axis=0))


def _leaf(nodes: int) -> FloatArray:
    """(nodes + 1,) [m]: value of a subtree of m nodes whose root has no children; -inf unless m is 1."""
    values = np.full(nodes + 1, -np.inf)
    values[1] = 1.0
    return values


def _scaled(values: FloatArray, prob: float) -> FloatArray:
    """values * prob, with -inf kept also at probability 0."""
    return np.where(np.isfinite(values), values, 0.0) * prob + np.where(np.isfinite(values), 0.0, -np.inf)


def _best_splits(first: FloatArray, second: FloatArray) -> FloatArray:
    """Max-plus convolution: [m] is the maximum over y of first[y] + second[m - y]; all of one length."""
    size = len(first)
    padded = np.concatenate((second[::-1], np.full(size, -np.inf)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, size)[size - 1 :: -1]  # [m, y]: second[m - y]
    best = np.empty(size)
    for begin in range(0, size, BLOCK_ROWS):
        end = min(begin + BLOCK_ROWS, size)
        best[begin:end] = (windows[begin:end, :end] + first[:end]).max(axis=1)
    return best


def _split(tables: Sequence[_Table], acceptance: Acceptance, depth: int, size: int) -> list[int]:
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
