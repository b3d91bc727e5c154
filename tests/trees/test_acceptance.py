"""Acceptance as it is read, estimated from counts, and smoothed."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import ConfigError
from bough.trees.acceptance import PRIOR_NODES, acceptance_from, by_depth_and_rank, by_rank, smoothed
from bough.trees.scheme_acceptance import DepthCounts, SchemeAcceptance
from bough.trees.tree_plan import Scheme

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "v: must be a list of probabilities"),
        ({"0": 0.5}, "v: must be a list of probabilities"),
        (0.5, "v: must be a list of probabilities"),
        ([[]], r"v\[0\]: must have at least one probability"),
        ([0.5, -0.25], r"v\[1\]: must be a probability from 0 to 1, got -0\.25"),
        ([0.5, NAN], r"v\[1\]: must be .* got nan"),
        ([[0.5], [0.25, 1.5]], r"v\[1\]\[1\]: must be .* got 1\.5"),
        ([0.5, "0.25"], r"v\[1\]: must be .* got '0\.25'"),
        ([True], r"v\[0\]: must be .* got True"),
        ([0.5, [0.25]], r"v\[1\]: must be .* got \[0\.25\]"),
        ([0.5, None], r"v\[1\]: must be .* got None"),
        ([0.6, 0.5], r"v: must sum to at most 1, as at most one child is accepted, got 1\.1"),
        ([[0.5], [0.6, 0.5]], r"v\[1\]: must sum to at most 1, .* got 1\.1"),
    ],
)
def test_lists_that_are_no_probabilities_are_refused_by_entry(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        acceptance_from("v", value)


def test_short_rows_are_filled_with_zeros() -> None:
    assert acceptance_from("v", [0.5, 0]).tolist() == [[0.5, 0.0]]
    assert acceptance_from("v", [[0.5, 0.25], [1]]).tolist() == [[0.5, 0.25], [1.0, 0.0]]


rows = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(rows)
def test_smoothing_gives_the_nearest_monotone_row(row: list[float]) -> None:
    """By the min-max formula for isotonic regression, an independent form of the same thing."""
    (smooth,) = smoothed(np.array([row])).tolist()
    size = len(row)
    expected = [
        max(min(np.mean(row[begin : end + 1]) for begin in range(rank + 1)) for end in range(rank, size))
        for rank in range(size)
    ]
    assert smooth == pytest.approx(expected, abs=1e-12)
    assert sum(smooth) == pytest.approx(sum(row))
    assert all(one >= two for one, two in pairwise(smooth))


def test_entries_with_more_observations_have_more_weight() -> None:
    assert smoothed(np.array([[0.2, 0.5]]), np.array([[3.0, 1.0]])).tolist() == [[0.275, 0.275]]


def counted(*depths: tuple[list[float], list[float]]) -> SchemeAcceptance:
    return SchemeAcceptance(Scheme.TARGET, 1, tuple(DepthCounts(tuple(a), tuple(r)) for a, r in depths))


def test_with_equal_numbers_of_children_the_estimate_is_accepted_over_nodes() -> None:
    assert by_rank(counted(([50, 20, 10], [0, 0, 20]))).tolist() == [pytest.approx([0.5, 0.2, 0.1])]


def test_nodes_with_few_children_do_not_affect_later_ranks() -> None:
    """100 nodes with one child and 100 with two, the same draft: the second child's chances are not halved."""
    pooled = by_rank(counted(([120, 20], [40, 20])))
    assert pooled.tolist() == [pytest.approx([0.6, 0.4 * 20 / 40])]


@given(
    st.lists(
        st.tuples(*[st.lists(st.integers(0, 9), min_size=1, max_size=6)] * 2).map(
            lambda pair: (list(map(float, pair[0])), list(map(float, pair[1])))
        ),
        min_size=1,
        max_size=4,
    )
)
def test_estimates_are_probabilities_and_monotone(depths: list[tuple[list[float], list[float]]]) -> None:
    for estimate in (by_rank(counted(*depths)), by_depth_and_rank(counted(*depths))):
        assert np.isfinite(estimate).all()
        assert (estimate >= 0).all()
        assert (estimate.sum(axis=1) <= 1 + 1e-9).all()
        assert (np.diff(estimate, axis=1) <= 0).all()


def test_depths_with_few_nodes_are_estimated_from_the_others() -> None:
    many, few = ([900.0, 0.0], [0.0, 100.0]), ([0.0, 0.0], [0.0, 1.0])
    common = by_rank(counted(many, few))[0, 0]
    by_depth = by_depth_and_rank(counted(many, few))
    assert by_depth[0, 0] == pytest.approx((900 + PRIOR_NODES * common) / (1000 + PRIOR_NODES))
    assert by_depth[1, 0] == pytest.approx(PRIOR_NODES * common / (PRIOR_NODES + 1))
    alone = ([0.0, 0.0], [0.0, 1000.0])
    assert by_depth_and_rank(counted(many, alone))[1, 0] < 0.05


def test_probabilities_are_recovered_from_counts_with_any_number_of_children() -> None:
    """Simulated, seeded: nodes offer one to four children of any value. 5 standard errors of 20,000."""
    truth, rng = np.array([0.5, 0.2, 0.1, 0.05]), np.random.default_rng(3)
    accepted, rejected = [0.0] * 4, [0.0] * 4
    for num_children, draw in zip(rng.integers(1, 5, 20_000), rng.random(20_000), strict=True):
        rank = int(np.searchsorted(list(accumulate(truth)), draw, side="right"))
        if rank < num_children:
            accepted[rank] += 1
        else:
            rejected[num_children - 1] += 1
    estimate = by_rank(counted((accepted, rejected)))[0]
    assert np.abs(estimate - truth).max() < 5 * np.sqrt(0.25 / 5_000)
