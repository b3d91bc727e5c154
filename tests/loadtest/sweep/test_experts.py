"""The benchmark of mixtures, with sweeps that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from bough.sizing.distinct_experts import distinct_share
from loadtest.regret.regimes import GOOD
from loadtest.sweep.experts import FIXED, MIXTURE, ROWS, SHOWN, Ran, predictions, speed


def turns(overlap: float) -> list[dict[int, Ran]]:
    """Sweeps whose time is that of the experts alone."""
    share = MIXTURE.chosen_share
    ratios = distinct_share(share, np.array(ROWS), overlap) / share
    return [{rows: Ran(0.01 * ratio, ratio) for rows, ratio in zip(ROWS, ratios.tolist(), strict=True)}] * 3


def test_measured_sweeps_are_compared_with_predictions() -> None:
    figures = predictions(turns(0.3))
    assert list(figures["experts"]) == list(figures["seconds"]) == [*SHOWN]
    for rows in SHOWN:
        counted, predicted, independent = figures["experts"][rows]
        assert predicted == pytest.approx(counted, rel=0.02)
        assert independent > counted
        measured, predicted, dense = figures["seconds"][rows]
        assert measured == counted
        assert predicted == pytest.approx(measured, rel=0.2)
        assert abs(predicted - measured) < abs(dense - measured) or rows > 5


def test_speeds_are_those_of_plain_decoding_times_a_ratio() -> None:
    """Nearly all rows choose the same experts, or each its own."""
    together, apart = (speed(turns(overlap), GOOD, 1, 48) for overlap in (0.9, 0.0))
    assert {*together} == {"self-sized", "dense", "nodes", *map(str, FIXED)}
    assert together["self-sized"] > 1.3
    assert together["16"] > 2 * apart["16"]
