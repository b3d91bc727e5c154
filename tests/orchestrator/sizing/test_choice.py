"""Which size is chosen, compared with every other size; and two trees merged into one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidTree
from bough.protocol.cost_curve import CostCurve
from bough.trees.tree import Tree
from orchestrator.sizing.choice import GainProfile, PredictedSize, SweepLoad, TreeGains, best_size, cut_size
from orchestrator.sizing.plans import merged, union
from tests.trees.test_tree import VOCAB, trees

SIZES = np.arange(1, 513)
FLAT_TO_64 = CostCurve((64, 128), (1.0, 2.0), 8)  # offloaded: a knee at 64 rows
LINEAR = CostCurve((8, 64), (0.3, 1.7), 8)  # resident: every eight rows cost


def grown(profile: GainProfile, values: list[float], rounds: int = 40) -> GainProfile:
    for _ in range(rounds):
        profile.observe(TreeGains.of(np.array([1.0, *values])))
    return profile


def test_a_second_is_worth_the_tokens_of_all_sessions_in_it() -> None:
    alone, shared = (best_size(GainProfile(), SweepLoad(FLAT_TO_64, num_trees=n), 0.05, SIZES) for n in (1, 4))
    assert alone.price == pytest.approx(alone.rate)
    assert shared.price == pytest.approx(4 * shared.rate)


def test_a_sweep_is_predicted_with_the_other_sessions_rows() -> None:
    load = SweepLoad(FLAT_TO_64, num_context=8, num_trees=3, other_rows=88)
    assert load.expected_sweep(32) == FLAT_TO_64(128)


def test_slower_networks_make_trees_larger() -> None:
    near, far = (best_size(GainProfile(), SweepLoad(LINEAR, fixed_seconds=s), 0.05, SIZES) for s in (0.0, 2.0))
    assert far.num_nodes > near.num_nodes


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=40),
    st.integers(1, 9),
    st.floats(0.01, 20),
    st.integers(0, 30),
    st.integers(1, 40),
)
def test_a_cut_is_the_best_possible(values: list[float], step: int, price: float, others: int, most: int) -> None:
    """By the price and with two others at `others` nodes each, against every other cut."""
    ranked = np.array([1.0, *sorted(values, reverse=True)])
    load = SweepLoad(CostCurve((4, 20, 40), (0.5, 0.5, 2.0), step), num_context=3, num_trees=3)
    rows = 3 + 2 * others
    worth = [ranked[:n].sum() - price * load.curve(rows + n) for n in range(1, min(len(ranked), most) + 1)]
    best = PredictedSize(others, 1.0, 1.0, price)
    assert worth[cut_size(ranked, load, best, 1.0, most) - 1] == pytest.approx(max(worth))


def test_a_lower_price_leaves_the_target_more_nodes() -> None:
    values = np.array([1.0, *np.linspace(0.5, 0.01, 31)])
    load, best = SweepLoad(LINEAR), PredictedSize(8, 2.0, 1.0, 8.0)
    assert cut_size(values, load, best, 0.5, 32) > cut_size(values, load, best, 1.0, 32)


def test_a_profile_follows_grown_trees() -> None:
    values = sorted((0.9 * 0.8**rank for rank in range(31)), reverse=True)
    profile = grown(GainProfile(), values)
    assert profile.gains(np.array([1, 32]))[1] == pytest.approx(sum(values), rel=0.02)
    assert profile.gains(np.array([1]))[0] == 0.0


def test_depths_that_were_not_grown_follow_those_that_were() -> None:
    """A session whose trees were large once and are small now: its large ones are worth less as its small ones are."""
    profile = grown(GainProfile(), [0.8, 0.5, 0.5, *[0.2] * 28])
    large = profile.gains(np.array([32]))[0]
    grown(profile, [0.1, 0.05, 0.05])
    assert profile.gains(np.array([32]))[0] < 0.5 * large


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
def test_a_merged_tree_has_the_best_of_both_within_the_budget(pair: tuple[Tree, Tree], budget: int) -> None:
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
def test_a_node_keeps_its_first_log_probability(pair: tuple[Tree, Tree]) -> None:
    """Only `worth` says which estimate is believed: a node of both trees is still the draft's guess."""
    by_path = [dict(zip(paths(tree), tree.log_probs.tolist(), strict=True)) for tree in pair]
    both = union(*pair)
    assert both.log_probs.tolist() == [by_path[0].get(path, by_path[1].get(path)) for path in paths(both)]


def test_trees_with_different_roots_are_refused() -> None:
    with pytest.raises(InvalidTree, match="1 and 2"):
        merged(Tree.root(1), Tree.root(2), 4)


def test_a_log_probability_slightly_above_zero_does_not_order_a_child_before_its_parent() -> None:
    tree = Tree.of([0, 1, 2], [-1, 0, 1], [0.0, -1.0, 1e-6])
    tree.validate(VOCAB, max_nodes=3)
    merged(tree, Tree.root(0), 3).validate(VOCAB, max_nodes=3)
    assert merged(tree, Tree.root(0), 3).parents.tolist() == [-1, 0, 1]
