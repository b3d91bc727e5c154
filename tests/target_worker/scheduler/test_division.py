"""Dividing a sweep's rows among trees: against all ways to do it, on small cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.protocol.cost_curve import CostCurve
from bough.trees.tree import Tree
from target_worker.scheduler.row_division import SweepTree, Yield, divide

FREE = CostCurve((1, 1000), (1.0, 1.0))


def random_rider(random: np.random.Generator, size: int, may_leave_out: bool = True) -> SweepTree:
    parents = np.array([-1, *(random.integers(0, node) for node in range(1, size))], np.int32)
    log_probs = np.where(parents < 0, 0.0, np.log(random.uniform(0.05, 1.0, size)))
    return SweepTree.of(Tree.of([0] * size, parents.tolist(), log_probs.tolist()), may_leave_out)


def is_closed(rider: SweepTree, nodes: np.ndarray) -> bool:
    return 0 in nodes and all(int(rider.parents[node]) in nodes for node in nodes if node)


def worth(riders: list[SweepTree], kept: list[np.ndarray], fixed: int, cost: CostCurve, price: float) -> float:
    gained = sum(rider.values[nodes].sum() for rider, nodes in zip(riders, kept, strict=True))
    return float(gained - price * cost(fixed + sum(map(len, kept))))


def every_way(rider: SweepTree) -> list[np.ndarray]:
    """All closed sets that keep the floor."""
    least = set(rider.least().tolist())
    nodes = range(len(rider.values))
    sets = (np.array(some) for num in range(1, len(nodes) + 1) for some in itertools.combinations(nodes, num))
    return [some for some in sets if least <= set(some.tolist()) and is_closed(rider, some)]


cases = st.tuples(
    st.integers(0, 10_000),
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3),
    st.integers(0, 9),
    st.floats(0.0, 5.0),
    st.sampled_from([1, 3, 4]),
)


@settings(max_examples=80, deadline=None)
@given(cases)
def test_no_other_way_is_worth_more(
    case: tuple[int, list[tuple[int, bool]], int, float, int],
) -> None:
    seed, sizes, fixed, price, step = case
    random = np.random.default_rng(seed)
    riders = [random_rider(random, size, may) for size, may in sizes]
    seconds = np.cumsum(random.exponential(0.3, 6)) + 0.1
    cost = CostCurve(tuple(range(step, 7 * step, step)), tuple(seconds.tolist()), step)
    least, most = fixed + sum(len(rider.least()) for rider in riders), int(random.integers(1, 30))
    kept = divide(riders, fixed, cost, Yield(price), most)
    num_rows = fixed + sum(map(len, kept))
    assert num_rows <= max(most, least)
    for rider, nodes in zip(riders, kept, strict=True):
        assert is_closed(rider, nodes)
        assert set(rider.least().tolist()) <= set(nodes.tolist())
        assert nodes.tolist() == sorted(nodes.tolist())
        assert rider.may_leave_out or len(nodes) == len(rider.values)
    ways = itertools.product(*(every_way(rider) for rider in riders))
    best = max(
        worth(riders, list(way), fixed, cost, price) for way in ways if fixed + sum(map(len, way)) <= max(most, least)
    )
    assert worth(riders, kept, fixed, cost, price) == pytest.approx(best)


def test_where_rows_cost_nothing_nothing_is_left_out() -> None:
    riders = [random_rider(np.random.default_rng(seed), 40) for seed in range(3)]
    assert [len(nodes) for nodes in divide(riders, 100, FREE, Yield(50.0), 1000)] == [40, 40, 40]
    hopeless = SweepTree(np.array([1.0, 0.0, 0.0]), np.array([-1, 0, 0], np.int32))
    assert len(divide([hopeless], 0, FREE, Yield(50.0, 0.0), 1000)[0]) == 3, "though it is worth nothing either"


def test_what_seconds_have_brought_in_sweeps_that_were_too_long_does_not_make_this_one_too_long() -> None:
    """A target whose sweeps had been of all nodes once took twenty of them to find out that half would do better."""
    random = np.random.default_rng(0)
    riders = [random_rider(random, 64) for _ in range(8)]
    cost = CostCurve((1, 64, 640), (1.0, 1.0, 10.0))
    kept = divide(riders, 0, cost, Yield(0.0, 0.0), 1000)

    def rate(some: list[np.ndarray], gap: float) -> float:
        seconds = cost(sum(map(len, some))) + gap
        return sum(rider.values[nodes].sum() for rider, nodes in zip(riders, some, strict=True)) / seconds

    others = [divide(riders, 0, cost, Yield(price), 1000) for price in np.geomspace(0.1, 100, 60)]
    assert rate(kept, 0.0) >= max(rate(other, 0.0) for other in others) - 1e-9
    more = divide(riders, 0, cost, Yield(0.0, 5.0), 1000)
    assert rate(more, 5.0) >= max(rate(other, 5.0) for other in others) - 1e-9
    assert sum(map(len, more)) > sum(map(len, kept)), "what lies between sweeps is spread over more"
