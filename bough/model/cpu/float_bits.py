"""Conversion of single numbers between float32 and the bits of bfloat16 and float16, for compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.extending import overload

from bough.model.cpu.jit import strict_inline


@strict_inline
def rounded(value: Any) -> Any:
    """The bits of a float32 rounded to bfloat16, to nearest, ties to even."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@strict_inline
def widened(bits: Any) -> Any:
    """The float32 with these bits of a bfloat16."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@strict_inline
def from_half(bits: Any) -> Any:
    """The float32 with these bits of a float16, which must be finite."""
    shifted = np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13))
    magnitude = shifted.view(np.float32) * np.float32(2.0**112)  # difference of the exponents' biases
    return -magnitude if bits & np.uint16(0x8000) else magnitude


def put_number(out: Any, place: Any, number: Any) -> None:
    """Write a float32 to a place of an array of float32, or of the bits of bfloat16. For kernels only."""
    raise NotImplementedError


@overload(put_number)
def _put_number(out, place, number):  # type: (Any, Any, Any) -> Any  # noqa: ARG001
    def as_it_is(out, place, number):  # type: (Any, Any, Any) -> None
        out[place] = number

    def as_bits(out, place, number):  # type: (Any, Any, Any) -> None
        out[place] = rounded(number)

    return as_it_is if isinstance(out.dtype, types.Float) else as_bits
