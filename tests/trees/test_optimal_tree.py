"""Shapes: the dynamic programme against every shape there is, and the figures of the paper."""

from __future__ import annotations

import heapq
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.trees.acceptance import Acceptance, acceptance_from, smoothed
from bough.trees.optimal_tree import (
    LEAF,
    _SubtreeValues,
    _tables,
    best_chains,
    best_shape,
    expected_tokens,
    expected_tokens_of_chains,
    node_values,
)
from bough.trees.tree_plan import StaticShape, require_growth

DATA = Path(__file__).parents[2] / "loadtest" / "data"


def vector(name: str) -> Acceptance:
    return acceptance_from(name, json.loads((DATA / f"acceptance-{name}.json").read_text()))


def normalised(rows: list[list[float]]) -> Acceptance:
    """Rows that sum to less than 1, as probabilities of exclusive events do."""
    width = max(map(len, rows))
    return np.array([[*row, *[0.0] * (width - len(row))] for row in rows]) / (1 + max(map(sum, rows)))


probs = st.floats(0, 1) | st.just(0.0)
acceptances = st.lists(st.lists(probs, min_size=1, max_size=4), min_size=1, max_size=4).map(normalised)


@cache
def forests(nodes: int, levels: int) -> tuple[tuple[object, ...], ...]:
    """Every ordered forest of this many nodes and at most this many levels, as nested tuples."""
    if nodes == 0:
        return ((),)
    if levels == 0:
        return ()
    return tuple(
        (first, *rest)
        for size in range(1, nodes + 1)
        for first in forests(size - 1, levels - 1)
        for rest in forests(nodes - size, levels)
    )


def worth(forest: tuple[object, ...], acceptance: Acceptance, depth: int = 0) -> float:
    """By definition: what the children of a node at `depth` are worth, if they are such a forest."""
    row = acceptance[min(depth, len(acceptance) - 1)]
    return sum(
        (row[rank] if rank < len(row) else 0.0) * (1 + worth(child, acceptance, depth + 1))
        for rank, child in enumerate(forest)
    )


@given(acceptances, st.integers(1, 7), st.integers(1, 6))
def test_no_shape_is_better_than_the_optimal_one(acceptance: Acceptance, nodes: int, levels: int) -> None:
    shape = best_shape(acceptance, nodes, levels)
    assert shape.budget <= nodes
    assert max(shape.depths()) < levels
    require_growth("shape", shape, nodes)
    best = max(worth(f, acceptance) for size in range(nodes) for f in forests(size, levels - 1))
    assert expected_tokens(shape, acceptance) == pytest.approx(1 + best, rel=1e-12)


def test_a_likely_child_after_an_impossible_one_is_found() -> None:
    acceptance = np.array([[0.3, 0.0, 0.6]])
    assert best_shape(acceptance, 4, 4) == StaticShape((0, 0, 0))
    assert best_shape(acceptance, 3, 4) == StaticShape((0, 1))


@pytest.mark.parametrize(
    ("name", "nodes", "levels", "tokens"),
    [("measured", 64, 10, 3.8523), ("measured", 4, 4, 2.2914), ("published", 64, 64, 5.9166)],
)
def test_the_papers_figures_are_reproduced(name: str, nodes: int, levels: int, tokens: float) -> None:
    shape = best_shape(vector(name), nodes, levels)
    assert shape.budget == nodes
    assert expected_tokens(shape, vector(name)) == pytest.approx(tokens, abs=5e-5)


def test_a_shapes_value_equals_that_of_sampling_it() -> None:
    """Walks down by chance, as verification does; 5 standard errors: wrong once in a million runs, and seeded."""
    acceptance = np.array([[0.5, 0.3, 0.1], [0.2, 0.6, 0.1]])
    shape = best_shape(acceptance, 12, 4)
    children: list[list[int]] = [[] for _ in range(shape.budget)]
    for node, parent in enumerate(shape.parents, start=1):
        children[parent].append(node)
    rng = np.random.default_rng(5)
    tokens = []
    for _ in range(20_000):
        node, depth = 0, 0
        while True:
            edges = np.cumsum(acceptance[min(depth, 1)])
            rank = int(np.searchsorted(edges, rng.random(), side="right"))
            if rank >= len(children[node]):
                break
            node, depth = children[node][rank], depth + 1
        tokens.append(depth + 1)
    error = np.std(tokens) / np.sqrt(len(tokens))
    assert abs(np.mean(tokens) - expected_tokens(shape, acceptance)) < 5 * error


def test_worthless_nodes_are_left_out() -> None:
    assert best_shape(np.array([[0.0]]), 9, 9).parents == ()
    assert best_shape(np.array([[0.0, 0.5]]), 2, 9).parents == ()
    assert best_shape(np.array([[0.5, 0.25], [0.0, 0.0]]), 9, 9).parents == (0, 0)


def test_deeper_rows_are_used_at_their_depth() -> None:
    """A draft that is surely right at the second level, and never at the third."""
    acceptance = np.array([[0.5, 0.4], [1.0, 0.0], [0.0, 0.0]])
    assert best_shape(acceptance, 5, 9).parents == (0, 0, 1, 2)
    assert node_values(StaticShape((0, 0, 1, 2)), acceptance).tolist() == [1.0, 0.5, 0.4, 0.5, 0.4]


@given(acceptances, st.integers(1, 5), st.integers(1, 6))
def test_chains_equal_their_closed_form(acceptance: Acceptance, num: int, length: int) -> None:
    closed = expected_tokens_of_chains(num, length, acceptance)
    assert closed == pytest.approx(expected_tokens(StaticShape.chains(num, length), acceptance), rel=1e-12)
    if len(acceptance) == 1:
        starts, first = float(acceptance[0, :num].sum()), float(acceptance[0, 0])
        assert closed == pytest.approx(1 + starts * (1 - first**length) / (1 - first), rel=1e-12)


@given(acceptances, st.integers(2, 30), st.integers(2, 8))
def test_the_best_chains_are_within_their_sizes_and_never_better_than_the_best_shape(
    acceptance: Acceptance, nodes: int, levels: int
) -> None:
    chains = best_chains(acceptance, nodes, levels)
    assert chains.num * chains.length < nodes
    assert chains.length < levels
    best = chains.expected_tokens
    shape = best_shape(acceptance, nodes, levels)
    assert best <= expected_tokens(shape, acceptance) + 1e-12
    for length in range(1, min(levels, nodes)):
        for num in range(1, (nodes - 1) // length + 1):
            assert expected_tokens_of_chains(num, length, acceptance) <= best + 1e-12


def by_all_splits(acceptance: Acceptance, nodes: int, levels: int) -> list[_SubtreeValues]:
    """As `_tables`, by trying every split of every size."""
    leaf = np.full(nodes + 1, -np.inf)
    leaf[1] = 1.0
    tables = [_SubtreeValues(leaf[None], leaf, LEAF)]
    for depth in reversed(range(levels - 1)):
        values, below = [leaf], tables[-1].best
        for prob in acceptance[min(depth, len(acceptance) - 1)]:
            child = np.where(np.isfinite(below), np.nan_to_num(below, neginf=0.0) * prob, -np.inf)
            values.append(np.array([(values[-1][: m + 1] + child[m::-1]).max() for m in range(nodes + 1)]))
        tables.append(_SubtreeValues(np.stack(values), np.max(values, axis=0), LEAF))
    return tables[::-1]


def require_no_better_split(acceptance: Acceptance, nodes: int, levels: int) -> None:
    tables = by_all_splits(acceptance, nodes, levels)
    for table, expected in zip(_tables(acceptance, nodes, levels), tables, strict=True):
        np.testing.assert_allclose(table.best, expected.best, rtol=0, atol=1e-12)


@given(acceptances, st.integers(1, 24), st.integers(1, 8))
def test_no_split_is_missed(acceptance: Acceptance, nodes: int, levels: int) -> None:
    """Only splits near the best one of concave values are tried."""
    require_no_better_split(acceptance, nodes, min(levels, nodes))


def test_values_far_from_concave_are_split_correctly() -> None:
    """A likely child behind many that are never right: the best splits leap."""
    require_no_better_split(np.array([[0.2, *[0.0] * 9, 0.5, *[0.0] * 5, 0.3]]), 150, 6)


@pytest.mark.parametrize("seed", range(12))
def test_the_tree_is_the_best_of_all_splits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no two nodes are worth the same: of equal ones either may be taken."""
    acceptance = np.random.default_rng(seed).dirichlet(np.full(7, 0.5), 7)[:, :6]
    found = best_shape(acceptance, 60, 8)
    monkeypatch.setattr("bough.trees.optimal_tree._tables", by_all_splits)
    assert best_shape(acceptance, 60, 8) == found


@pytest.mark.parametrize("name", ["measured", "published"])
def test_the_largest_shapes_have_the_most_valuable_nodes(name: str) -> None:
    """Of falling acceptance the best nodes are simply taken one after the other."""
    acceptance = smoothed(vector(name))
    waiting, taken = [(-1.0, 0)], []  # (-value, depth) of nodes whose parents were taken
    while len(taken) < 4096:
        value, depth = heapq.heappop(waiting)
        taken.append(-value)
        if depth + 1 < 30:
            for prob in acceptance[0]:
                heapq.heappush(waiting, (value * prob, depth + 1))
    shape = best_shape(acceptance, 4096, 30)
    assert expected_tokens(shape, acceptance) == pytest.approx(sum(taken), rel=1e-12)
