"""Vector instructions in LLVM's terms, for kernels whose inner loops are written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils

from bough.model.cpu.jit import compiler_setting

LANES = 16  # float32 that a vector register holds
I16, I32, I64, POINTER = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.PointerType()
FLOATS, WORDS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(I32, LANES)
SHORT = 8  # words of a shorter vector, which registers hold with AVX and later
SECOND_LEVEL = 2  # of caches, as LLVM's prefetch counts them


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def has_feature(name: str) -> bool:
    """Whether there are instructions, by LLVM's name of them, on the processor that numba compiles for."""
    chosen = compiler_setting("CPU_FEATURES")  # None: those of this one
    if chosen is not None:
        return f"+{name}" in chosen.split(",")
    return bool(_own_features().get(name, False))


@cache
def _own_features() -> dict[str, bool]:
    """Of this processor. To ask takes a third of a millisecond, and products ask."""
    return dict(llvmlite.binding.get_host_cpu_features())


def multiplies_pairs() -> bool:
    """Whether bfloat16 is multiplied and added by pairs: by an instruction that Intel's processors have too.

    There it takes longer than the two of float32 whose work it does; AMD's do not.
    """
    name = compiler_setting("CPU_NAME") or llvmlite.binding.get_host_cpu_name()
    return has_feature("avx512bf16") and name.startswith("znver")


def multiplies_bytes() -> bool:
    """Whether bytes are multiplied and added several at a time: fours by one instruction, or twos by one before."""
    return any(map(has_feature, (*_ADD_FOURS, "avx2")))


def multiplies_and_adds() -> bool:
    """Whether a product is added and rounded once by an instruction; otherwise a library does so, number by number."""
    return has_feature("fma") or has_feature("neon")


_ADD_FOURS = "avx512vnni", "avxvnni"
_ADDS_TWOS = has_feature("avx2") and not any(map(has_feature, _ADD_FOURS))  # at most, of bytes' products
MOST_SIGNED = 64 if _ADDS_TWOS else 127  # of bytes with signs in products: two of them, times 255, must fit in 16 bits
# Vectors of LANES that registers hold; where a register is shorter, several of them make a vector.
NUM_VECTORS = 32 if has_feature("avx512f") else 8


def call(builder: ir.IRBuilder, name: str, kind: ir.FunctionType, arguments: Sequence[Any]) -> Any:
    """Of one of LLVM's intrinsics."""
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def dot_pairs(builder: ir.IRBuilder, sums: Any, first: Any, second: Any) -> Any:
    """sums + the dot product of each lane's two bfloat16, by one instruction where that is fast.

    That instruction takes numbers too small for their exponent as 0.
    """
    if multiplies_pairs():
        kind = ir.FunctionType(FLOATS, [FLOATS, _BFLOATS, _BFLOATS])
        factors = [builder.bitcast(words, _BFLOATS) for words in (first, second)]
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", kind, [sums, *factors])
    for one, other in zip(widened(builder, first), widened(builder, second), strict=True):
        sums = multiply_add(builder, sums, one, other)
    return sums


def dot_bytes(builder: ir.IRBuilder, sums: Any, signed: Any, unsigned: Any) -> Any:
    """sums + the dot product of each lane's four bytes, as whole numbers; one factor has signs and the other none.

    Bytes with signs are from -MOST_SIGNED to MOST_SIGNED.
    """
    if any(map(has_feature, _ADD_FOURS)):
        return _by_registers(builder, has_feature("avx512vnni"), _add_fours, sums, unsigned, signed)
    if has_feature("avx2"):
        is_long = has_feature("avx512bw")
        shorts = _by_registers(builder, is_long, _multiply_twos, unsigned, signed)
        return builder.add(sums, _by_registers(builder, is_long, _add_neighbours, shorts))

    def constant(number: int) -> ir.Constant:
        return ir.Constant(WORDS, [number] * LANES)

    for byte in range(4):
        first = builder.ashr(builder.shl(signed, constant(24 - 8 * byte)), constant(24))
        second = builder.and_(builder.lshr(unsigned, constant(8 * byte)), constant(0xFF))
        sums = builder.add(sums, builder.mul(first, second))
    return sums


def _by_registers(builder: ir.IRBuilder, are_long: bool, code: Callable[..., Any], *vectors: Any) -> Any:
    """An instruction for vectors that registers hold whole, or else by halves."""
    if are_long:
        return code(builder, *vectors)

    def half(vector: Any, second: int) -> Any:
        count = vector.type.count // 2
        return shuffled(builder, vector, vector, range(second * count, (second + 1) * count))

    low, high = (code(builder, *(half(vector, second) for vector in vectors)) for second in range(2))
    return shuffled(builder, low, high, range(2 * low.type.count))


def _add_fours(builder: ir.IRBuilder, sums: Any, unsigned: Any, signed: Any) -> Any:
    bits, bytes_ = 32 * sums.type.count, ir.VectorType(ir.IntType(8), 4 * sums.type.count)
    factors = [builder.bitcast(words, bytes_) for words in (unsigned, signed)]
    kind = ir.FunctionType(sums.type, [sums.type, bytes_, bytes_])
    return call(builder, f"llvm.x86.avx512.vpdpbusd.{bits}", kind, [sums, *factors])


def _multiply_twos(builder: ir.IRBuilder, unsigned: Any, signed: Any) -> Any:
    count = unsigned.type.count
    shorts, bytes_ = ir.VectorType(I16, 2 * count), ir.VectorType(ir.IntType(8), 4 * count)
    name = "llvm.x86.avx512.pmaddubs.w.512" if count == LANES else "llvm.x86.avx2.pmadd.ub.sw"
    factors = [builder.bitcast(words, bytes_) for words in (unsigned, signed)]
    return call(builder, name, ir.FunctionType(shorts, [bytes_, bytes_]), factors)


def _add_neighbours(builder: ir.IRBuilder, shorts: Any) -> Any:
    count = shorts.type.count // 2
    name = "llvm.x86.avx512.pmaddw.d.512" if count == LANES else "llvm.x86.avx2.pmadd.wd"
    kind = ir.FunctionType(ir.VectorType(I32, count), [shorts.type, shorts.type])
    return call(builder, name, kind, [shorts, ir.Constant(shorts.type, [1] * 2 * count)])


def widened(builder: ir.IRBuilder, words: Any) -> tuple[Any, Any]:
    """The first and the second of each lane's two as float32."""
    count = words.type.count
    sixteen, upper = ir.Constant(words.type, [16] * count), ir.Constant(words.type, [0xFFFF0000] * count)
    floats = ir.VectorType(ir.FloatType(), count)
    first = builder.bitcast(builder.shl(words, sixteen), floats)
    return first, builder.bitcast(builder.and_(words, upper), floats)


def rounded(builder: ir.IRBuilder, floats: Any) -> Any:
    """Vectors of the bits of bfloat16, to nearest and even."""

    def constant(number: int) -> ir.Constant:
        return ir.Constant(WORDS, [number] * LANES)

    bits = builder.bitcast(floats, WORDS)
    is_odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    upper = builder.lshr(builder.add(bits, builder.add(is_odd, constant(0x7FFF))), constant(16))
    return builder.trunc(upper, ir.VectorType(I16, LANES))


def multiply_add(builder: ir.IRBuilder, sums: Any, first: Any, second: Any) -> Any:
    """sums + first * second in float32, rounded once."""
    factors = [builder.bitcast(words, sums.type) for words in (first, second)]
    kind = ir.FunctionType(sums.type, [sums.type] * 3)
    return call(builder, f"llvm.fma.v{sums.type.count}f32", kind, [*factors, sums])


def exp_below_zero(builder: ir.IRBuilder, x: Any) -> Any:
    """e to the power of numbers that are not above 0, good to a few units in the last place, 0 at -87 and below.

    By halving (x = n ln 2 + r) and a polynomial in r, as in Cephes' expf.
    """

    def constant(number: float) -> ir.Constant:
        return ir.Constant(FLOATS, [number] * LANES)

    def words(number: int) -> ir.Constant:
        return ir.Constant(WORDS, [number] * LANES)

    unary = ir.FunctionType(FLOATS, [FLOATS])
    counts = builder.fcmp_ordered(">", x, constant(-87.0))
    near = builder.select(counts, x, constant(0.0))
    n = call(builder, "llvm.rint.v16f32", unary, [builder.fmul(near, constant(1.44269502))])
    r = multiply_add(builder, near, n, constant(-0.693359375))
    r = multiply_add(builder, r, n, constant(2.12194440e-4))
    power = constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        power = multiply_add(builder, constant(factor), power, r)
    shifted = builder.shl(builder.fptosi(n, WORDS), words(23))
    result = builder.bitcast(builder.add(builder.bitcast(power, WORDS), shifted), FLOATS)
    return builder.select(counts, result, constant(0.0))


def shuffled(builder: ir.IRBuilder, first: Any, second: Any, places: Sequence[int]) -> Any:
    """The numbers that stand in these places of two vectors one after the other."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(places)), list(places)))


def turned(b: ir.IRBuilder, lines: Sequence[Any]) -> list[Any]:
    """From SHORT words of each of SHORT lines, vectors of the first word of each, of the second, and so on."""
    words: dict[int, Any] = {}
    for half in range(2):
        # Within halves of a register, as instructions have it: two lines of a word, then four; then all eight.
        i = 2 * half
        by_two = (i, 8 + i, i + 1, 9 + i, i + 4, 12 + i, i + 5, 13 + i)
        twos = [shuffled(b, lines[place], lines[place + 1], by_two) for place in range(0, SHORT, 2)]
        for k in (0, 2):
            by_four = (k, k + 1, 8 + k, 9 + k, k + 4, k + 5, 12 + k, 13 + k)
            upper, lower = (shuffled(b, twos[place], twos[place + 1], by_four) for place in (0, 2))
            word = 2 * half + k // 2
            words[word] = shuffled(b, upper, lower, (0, 1, 2, 3, 8, 9, 10, 11))
            words[word + 4] = shuffled(b, upper, lower, (4, 5, 6, 7, 12, 13, 14, 15))
    return [words[word] for word in range(SHORT)]


def splat(builder: ir.IRBuilder, number: Any, count: int = LANES) -> Any:
    """The same number in all lanes."""
    undefined = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    return shuffled(builder, builder.insert_element(undefined, number, ir.Constant(I32, 0)), undefined, [0] * count)


def at(builder: ir.IRBuilder, base: Any, offset: Any) -> Any:
    """An address some bytes further."""
    return builder.gep(base, [offset], source_etype=ir.IntType(8))


def spaced(builder: ir.IRBuilder, begin: Any, step: Any, count: int) -> list[Any]:
    """So many addresses, each `step` bytes from the one before."""
    return [at(builder, begin, builder.mul(step, ir.Constant(I64, index))) for index in range(count)]


def array_of(context: Any, builder: ir.IRBuilder, kind: Any, value: Any) -> tuple[Any, list[Any], list[Any]]:
    """Of an array of numba's: address, bytes from one entry to the next along each axis, and its shape."""
    made = context.make_array(kind)(context, builder, value)
    return made.data, *(cgutils.unpack_tuple(builder, sizes) for sizes in (made.strides, made.shape))


def store(builder: ir.IRBuilder, vector: Any, address: Any) -> None:
    """To an address that need not be aligned."""
    builder.store(vector, builder.bitcast(address, vector.type.as_pointer()), align=2)


def load_some(builder: ir.IRBuilder, address: Any, which: Any) -> Any:
    """Words from an address that need not be aligned, where lanes of `which` are true; others are 0, and not read."""
    kind = ir.FunctionType(WORDS, [POINTER, I32, which.type, WORDS])
    arguments = builder.bitcast(address, POINTER), ir.Constant(I32, 2), which, ir.Constant(WORDS, [0] * LANES)
    return call(builder, "llvm.masked.load.v16i32.p0", kind, arguments)


def prefetch(builder: ir.IRBuilder, address: Any, level: int) -> None:
    """Brings a line of memory nearer that will be read and wanted again."""
    kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
    flags = [ir.Constant(I32, flag) for flag in (0, level, 1)]  # for reading, where to, data
    call(builder, "llvm.prefetch.p0", kind, [builder.bitcast(address, POINTER), *flags])
