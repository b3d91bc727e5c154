"""Cost curves at whole arrays of row counts."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bough.protocol.cost_curve import CostCurve


def seconds_at(curve: CostCurve, rows: ArrayLike) -> NDArray[np.float64]:
    """Seconds for each of these numbers of rows."""
    padded: NDArray[np.int64] = -(-np.maximum(rows, 1) // curve.step) * curve.step
    inside: NDArray[np.float64] = np.interp(padded, curve.rows, curve.seconds)
    return inside + curve.last_slope * np.maximum(padded - curve.rows[-1], 0)


def sizes_up_to(curve: CostCurve, most: int) -> NDArray[np.int64]:
    """The multiples of the curve's `step` up to `most`, and `most` itself: the only candidates for a best size."""
    edges = np.arange(curve.step, most + 1, curve.step)
    return edges if len(edges) and edges[-1] == most else np.append(edges, most)
