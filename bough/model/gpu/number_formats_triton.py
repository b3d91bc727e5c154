"""Numbers of few bits as float32, and float32 as the numbers that are computed with, on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(value: tl.tensor, IS_BF16: tl.constexpr, out: tl.tensor) -> tl.tensor:
    """Convert to the type of `out`: bfloat16 as bits rounded to nearest even; Triton's interpreter does not round."""
    if IS_BF16:
        bits = value.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    return value.to(out.dtype.element_ty)


@triton.jit
def from_e4m3(bits: tl.tensor) -> tl.tensor:
    """The float32 of E4M3 numbers, by way of float16, whose exponent has one bit more; any GPU can do this."""
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def from_e2m1(bits: tl.tensor) -> tl.tensor:
    """The float32 of E2M1 numbers, by way of float16, whose exponent has three bits more."""
    half = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def from_e8m0(bits: tl.tensor) -> tl.tensor:
    """The float32 of powers of two, whose bits are a float32's exponent; the smallest is subnormal."""
    bits = bits.to(tl.int32)
    return tl.where(bits == 0, 1 << 22, tl.where(bits == 255, 0x7FC00000, bits << 23)).to(tl.float32, bitcast=True)
