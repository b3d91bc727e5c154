"""Single numbers in compiled code: bfloat16 and float16 as their bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from bough.model.cpu.jit import strict_inline


@strict_inline
def rounded(value: Any) -> Any:
    """The upper half of a float32's bits, rounded to nearest and even: bfloat16."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@strict_inline
def widened(bits: Any) -> Any:
    """bfloat16's bits as float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@strict_inline
def from_half(bits: Any) -> Any:
    """float16's bits as float32. Of finite numbers: where those have their largest exponent, float16 has no end."""
    shifted = np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13))
    magnitude = shifted.view(np.float32) * np.float32(2.0**112)  # the difference of the exponents' biases
    return -magnitude if bits & np.uint16(0x8000) else magnitude
