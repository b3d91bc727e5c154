"""Curves of seconds by rows: padding, interpolation, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidCurve
from bough.protocol.cost_curve import MAX_KNOTS, CostCurve


def test_seconds_are_linear_between_knots_and_extrapolated_beyond_the_last() -> None:
    curve = CostCurve((8, 64, 128), (1.0, 1.0, 3.0), 8)
    assert [curve(rows) for rows in (1, 8, 9, 64, 96, 128, 160)] == [1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0]
    assert curve(65) == curve(72) == 1.25
    assert curve.scaled(2.0)(96) == 4.0


def test_a_single_knot_is_divided_by_its_rows() -> None:
    assert [CostCurve((4,), (2.0,))(rows) for rows in (1, 4, 8)] == [2.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("curve", "named"),
    [
        (CostCurve((), ()), "cost: .* got 0 rows"),
        (CostCurve((1, 2), (1.0,)), "cost: must have .* got 2 rows and 1 seconds"),
        (CostCurve(tuple(range(1, MAX_KNOTS + 2)), (1.0,) * (MAX_KNOTS + 1)), f"cost: .* got {MAX_KNOTS + 1} rows"),
        (CostCurve((1,), (1.0,), 0), r"cost\.step: must .* got 0"),
        (CostCurve((0,), (1.0,)), r"cost\.rows\[0\]: must be 1 .* got 0"),
        (CostCurve((4, 4), (1.0, 1.0)), r"cost\.rows\[1\]: must be 5 .* got 4"),
        (CostCurve((1,), (0.0,)), r"cost\.seconds\[0\]: must .* got 0"),
        (CostCurve((1,), (math.nan,)), r"cost\.seconds\[0\]: must .* got nan"),
        (CostCurve((1,), (math.inf,)), r"cost\.seconds\[0\]: must .* got inf"),
        (CostCurve((1, 2), (1.0, 0.9)), r"cost\.seconds\[1\]: must be at least 1\.0, .* got 0\.9"),
    ],
)
def test_an_invalid_curve_is_refused_by_name(curve: CostCurve, named: str) -> None:
    with pytest.raises(InvalidCurve, match=named):
        curve.validate("cost")


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 9)), min_size=1, max_size=9),
    st.integers(1, 16),
)
def test_more_rows_never_take_less_time(increments: list[tuple[int, float]], step: int) -> None:
    rows, seconds = (np.cumsum(part) for part in zip(*increments, strict=True))
    curve = CostCurve(tuple(rows.tolist()), tuple((seconds + 0.1).tolist()), step)
    curve.validate("cost")
    assert (np.diff([curve(rows) for rows in range(1, 600)]) >= -1e-9).all()
