"""Two trees as one: nothing invented, nothing better left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidTree
from bough.trees.tree import Tree
from orchestrator.sizing.plans import merged, union
from tests.trees.test_tree import VOCAB, trees

Paths = dict[tuple[int, ...], float]


def same_root(tree: Tree) -> Tree:
    """With root 0; and with tokens that another such tree is likely to have as well."""
    tokens = np.zeros_like(tree.tokens)
    for siblings in tree.children():
        for rank, node in enumerate(siblings.values()):
            tokens[node] = rank
    return Tree(tokens, tree.parents, tree.log_probs)


def paths(tree: Tree) -> Paths:
    """Tokens from the root to each node, and the node's estimate."""
    return {
        tuple(int(tree.tokens[step]) for step in tree.path(node)): float(tree.estimates[node])
        for node in range(len(tree))
    }


def naive_union(left: Paths, right: Paths) -> Paths:
    return {path: max(left.get(path, -np.inf), right.get(path, -np.inf)) for path in left.keys() | right.keys()}


def score(union: Paths, path: tuple[int, ...]) -> float:
    return sum(union[path[: length + 1]] for length in range(len(path)))


two_trees = st.tuples(trees(), trees()).map(lambda pair: (same_root(pair[0]), same_root(pair[1])))


@given(two_trees, st.integers(1, 90))
def test_the_best_of_both_within_the_budget_best_first(pair: tuple[Tree, Tree], budget: int) -> None:
    union = naive_union(paths(pair[0]), paths(pair[1]))
    result = merged(*pair, budget)
    result.validate(VOCAB, max_nodes=budget)
    assert len(result) == min(budget, len(union))
    assert paths(result).items() <= union.items()
    best = sorted((score(union, path) for path in union), reverse=True)[: len(result)]
    assert sorted(result.scores().tolist(), reverse=True) == pytest.approx(best, abs=1e-3)
    for each in (result, merged(*pair, 90)):
        assert (np.diff(each.scores()) <= 0).all(), "siblings too"


@given(two_trees)
def test_a_node_keeps_the_log_probability_of_whoever_guessed_it_first(pair: tuple[Tree, Tree]) -> None:
    """Only `worth` says which estimate is believed: a node of both trees is still the draft's guess."""
    by_path = [dict(zip(paths(tree), tree.log_probs.tolist(), strict=True)) for tree in pair]
    both = union(*pair)
    assert both.log_probs.tolist() == [by_path[0].get(path, by_path[1].get(path)) for path in paths(both)]


def test_trees_of_different_roots_are_refused() -> None:
    with pytest.raises(InvalidTree, match="1 and 2"):
        merged(Tree.root(1), Tree.root(2), 4)


def test_a_log_probability_a_hair_above_nothing_puts_no_child_before_its_parent() -> None:
    tree = Tree.of([0, 1, 2], [-1, 0, 1], [0.0, -1.0, 1e-6])
    tree.validate(VOCAB, max_nodes=3)
    merged(tree, Tree.root(0), 3).validate(VOCAB, max_nodes=3)
    assert merged(tree, Tree.root(0), 3).parents.tolist() == [-1, 0, 1]
