"""Single numbers in compiled code: bfloat16 as its bits, and an exponential."""

from __future__ import annotations

import numba
import numpy as np

_compiled = numba.njit(fastmath=False, cache=True, error_model="numpy", inline="always")


@_compiled
def rounded(value):  # type: ignore[no-untyped-def]
    """The upper half of a float32's bits, rounded to nearest and even: bfloat16."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@_compiled
def widened(bits):  # type: ignore[no-untyped-def]
    """bfloat16's bits as float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@numba.njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, cache=True, error_model="numpy")
def exp_below_zero(x):  # type: ignore[no-untyped-def]
    """e to the power of x <= 0, float32, good to a few units in the last place, 0 below -87.

    By hand, so that it is compiled into vector instructions: the library's would be called number by number. The same
    steps as in `bough.model.vectors`.
    """
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    power = np.int32(np.int32(np.int32(max(n, np.float32(-126))) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * power if x > np.float32(-87) else np.float32(0)
