"""Work that threads take piece by piece, so that one which the system has put aside is not waited for.

A loop divided evenly lasts as long as the thread that was interrupted most; the reads of a checkpoint interrupt some
thread hundreds of times in a sweep.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from bough.model.vectors import I64


def counter() -> np.ndarray:
    """Of the pieces that are taken; each loop wants its own."""
    return np.zeros(1, np.int64)


def _take(_context, counter):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
        taken = context.make_array(signature.args[0])(context, builder, values[0]).data
        return builder.atomic_rmw("add", taken, ir.Constant(I64, 1), "monotonic")

    return numba.types.int64(counter), codegen


# take(counter), in compiled code: the number of a piece that nobody has taken yet; the caller knows how many there are.
take: Any = intrinsic(_take)
