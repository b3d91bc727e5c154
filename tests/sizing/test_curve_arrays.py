"""Cost curves at arrays of row counts."""

from __future__ import annotations

import numpy as np

from bough.protocol.cost_curve import CostCurve
from bough.sizing.sweep_times import seconds_at, sizes_up_to


def test_an_array_gives_the_same_seconds_as_each_number_of_rows() -> None:
    for curve in (CostCurve((8, 64, 128), (1.0, 1.0, 3.0), 8), CostCurve((4,), (2.0,))):
        rows = np.arange(0, 300)
        np.testing.assert_allclose(seconds_at(curve, rows), [curve(int(number)) for number in rows], rtol=1e-12)


def test_sizes_without_padding() -> None:
    assert sizes_up_to(CostCurve((8,), (1.0,), 8), 20).tolist() == [8, 16, 20]
    assert sizes_up_to(CostCurve((8,), (1.0,), 8), 16).tolist() == [8, 16]
    assert sizes_up_to(CostCurve((8,), (1.0,), 8), 3).tolist() == [3]
    assert sizes_up_to(CostCurve((8,), (1.0,)), 3).tolist() == [1, 2, 3]
