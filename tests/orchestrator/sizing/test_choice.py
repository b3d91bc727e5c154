"""Which size is chosen: against every other size, on staircases, and at the edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.protocol.cost_curve import CostCurve
from orchestrator.sizing.choice import GainProfile, PredictedSize, SweepLoad, TreeGains, best_size, cut_size

SIZES = np.arange(1, 513)
FLAT_TO_64 = CostCurve((64, 128), (1.0, 2.0), 8)  # offloaded: a knee at 64 rows
LINEAR = CostCurve((8, 64), (0.3, 1.7), 8)  # resident: every eight rows cost


def grown(profile: GainProfile, values: list[float], rounds: int = 40) -> GainProfile:
    for _ in range(rounds):
        profile.observe(TreeGains.of(np.array([1.0, *values])))
    return profile


def test_a_second_is_worth_what_all_sessions_get_in_it() -> None:
    alone, shared = (best_size(GainProfile(), SweepLoad(FLAT_TO_64, num_trees=n), 0.05, SIZES) for n in (1, 4))
    assert alone.price == pytest.approx(alone.rate)
    assert shared.price == pytest.approx(4 * shared.rate)


def test_a_sweep_is_expected_with_others_as_they_have_been() -> None:
    load = SweepLoad(FLAT_TO_64, num_context=8, num_trees=3, other_rows=88)
    assert load.expected_sweep(32) == FLAT_TO_64(128)


def test_seconds_of_a_network_make_trees_larger() -> None:
    near, far = (best_size(GainProfile(), SweepLoad(LINEAR, fixed_seconds=s), 0.05, SIZES) for s in (0.0, 2.0))
    assert far.num_nodes > near.num_nodes


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=40),
    st.integers(1, 9),
    st.floats(0.01, 20),
    st.integers(0, 30),
    st.integers(1, 40),
)
def test_a_cut_is_the_best_of_all_cuts(values: list[float], step: int, price: float, others: int, most: int) -> None:
    """By the price and with two others at `others` nodes each, against every other cut."""
    ranked = np.array([1.0, *sorted(values, reverse=True)])
    load = SweepLoad(CostCurve((4, 20, 40), (0.5, 0.5, 2.0), step), num_context=3, num_trees=3)
    rows = 3 + 2 * others
    worth = [ranked[:n].sum() - price * load.curve(rows + n) for n in range(1, min(len(ranked), most) + 1)]
    best = PredictedSize(others, 1.0, 1.0, price)
    assert worth[cut_size(ranked, load, best, 1.0, most) - 1] == pytest.approx(max(worth))


def test_less_of_the_price_leaves_more_for_the_target_to_choose_from() -> None:
    values = np.array([1.0, *np.linspace(0.5, 0.01, 31)])
    load, best = SweepLoad(LINEAR), PredictedSize(8, 2.0, 1.0, 8.0)
    assert cut_size(values, load, best, 0.5, 32) > cut_size(values, load, best, 1.0, 32)


def test_a_profile_follows_what_was_grown() -> None:
    values = sorted((0.9 * 0.8**rank for rank in range(31)), reverse=True)
    profile = grown(GainProfile(), values)
    assert profile.gains(np.array([1, 32]))[1] == pytest.approx(sum(values), rel=0.02)
    assert profile.gains(np.array([1]))[0] == 0.0


def test_what_was_not_grown_changes_with_what_was() -> None:
    """A session whose trees were large once and are small now: its large ones are worth less as its small ones are."""
    profile = grown(GainProfile(), [0.8, 0.5, 0.5, *[0.2] * 28])
    large = profile.gains(np.array([32]))[0]
    grown(profile, [0.1, 0.05, 0.05])
    assert profile.gains(np.array([32]))[0] < 0.5 * large
