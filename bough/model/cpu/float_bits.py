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


@strict_inline
def to_half(value: Any) -> Any:
    """The bits of a float32 rounded to float16, to nearest, ties to even, as int16."""
    bits = np.float32(value).view(np.uint32)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Below 2**-14 a float16 has steps of 2**-24, like a float32 from 0.5 to 1: adding 0.5 rounds.
    small = np.uint32(np.float32(size.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000))
    is_odd = (size >> np.uint32(13)) & np.uint32(1)
    normal = np.uint32((size - np.uint32(0x38000000) + np.uint32(0xFFF) + is_odd) >> np.uint32(13))
    beyond = np.uint32(0x7C00) if size <= np.uint32(0x7F800000) else np.uint32(0x7E00)
    finite = small if size < np.uint32(0x38800000) else normal
    half = finite if size < np.uint32(0x47800000) else beyond
    return np.int16(half | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


def put_number(out: Any, place: Any, number: Any) -> None:
    """Write a float32 to a place of an array of float32, or of the bits of bfloat16 (uint16) or float16 (int16).

    For kernels only.
    """
    raise NotImplementedError


@overload(put_number)
def _put_number(out, place, number):  # type: (Any, Any, Any) -> Any  # noqa: ARG001
    def as_it_is(out, place, number):  # type: (Any, Any, Any) -> None
        out[place] = number

    def as_bits(out, place, number):  # type: (Any, Any, Any) -> None
        out[place] = rounded(number)

    def as_half(out, place, number):  # type: (Any, Any, Any) -> None
        out[place] = to_half(number)

    if isinstance(out.dtype, types.Float):
        return as_it_is
    return as_half if out.dtype.signed else as_bits
