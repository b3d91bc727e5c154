"""Vectors of LANES numbers as values in kernels; LLVM would compile loops over lanes number by number.

`load` and `store` move LANES consecutive numbers, a row of an array (rows, LANES) or the numbers from an index of a
one-dimensional array; operators and functions compute lane by lane, in float32 or int32. For kernels only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_model

from bough.model.cpu import llvm_vectors
from bough.model.cpu.llvm_vectors import FLOATS, I16, I64, LANES, NUM_VECTORS, WORDS, array_of, at, spaced, splat

SUMS = min(8, NUM_VECTORS // 2)  # vectors of sums that fit in registers besides their operands
_BYTES = 4  # bytes of a number


class Lanes(types.Type):
    """The numba type of a vector."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"{LANES} of {kind}")


_FLOATS, _WORDS, _BITS = Lanes("float32"), Lanes("int32"), Lanes("bfloat16's bits")
_CODE = {_FLOATS: FLOATS, _WORDS: WORDS, _BITS: ir.VectorType(I16, LANES)}
Code = Callable[..., Any]  # generates LLVM IR for an operation from a builder and operands


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _CODE[kind])  # type: ignore[no-untyped-call]


def _kind_of(number: Any) -> Lanes:
    return _FLOATS if isinstance(number, types.Float) else _WORDS


def _place(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
    made = context.make_array(signature.args[0])(context, builder, values[0])
    step = cgutils.unpack_tuple(builder, made.strides)[0]
    return at(builder, made.data, builder.mul(step, values[1]))


def _load_row(_context: Any, array: Any, _row: Any) -> Any:
    kind = _kind_of(array.dtype)

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(_place(context, builder, signature, values), typ=_CODE[kind], align=4)

    return kind(array, types.intp), codegen


def _store_row(_context: Any, array: Any, _row: Any, vector: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        llvm_vectors.store(builder, values[2], _place(context, builder, signature, values))
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


def _same(_context: Any, number: Any) -> Any:
    return _typed(llvm_vectors.splat, _kind_of(number), (number,))


def _typed(code: Code, result: types.Type | None, arguments: tuple[Any, ...]) -> tuple[Any, Code]:
    def codegen(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return code(builder, *values)

    return (result or arguments[0])(*arguments), codegen


def _of_one(code: Code, result: types.Type | None = None) -> Any:
    def function(_context: Any, first: Any) -> Any:
        return _typed(code, result, (first,))

    return intrinsic(function)


def _of_two(code: Code, result: types.Type | None = None) -> Any:
    def function(_context: Any, first: Any, second: Any) -> Any:
        return _typed(code, result, (first, second))

    return intrinsic(function)


def _of_three(code: Code, result: types.Type | None = None) -> Any:
    def function(_context: Any, first: Any, second: Any, third: Any) -> Any:
        return _typed(code, result, (first, second, third))

    return intrinsic(function)


def _called(name: str) -> Code:
    def code(builder: ir.IRBuilder, *values: Any) -> Any:
        kind = ir.FunctionType(FLOATS, [FLOATS] * len(values))
        return llvm_vectors.call(builder, f"llvm.{name}.v{LANES}f32", kind, values)

    return code


def _nearest(builder: ir.IRBuilder, numbers: Any) -> Any:
    return builder.fptosi(_called("rint")(builder, numbers), WORDS)


def _pair(builder: ir.IRBuilder, low: Any, high: Any) -> Any:
    low, high = (builder.zext(llvm_vectors.rounded(builder, numbers), WORDS) for numbers in (low, high))
    return builder.or_(low, builder.shl(high, ir.Constant(WORDS, [16] * LANES)))


def _add_products(_context: Any, numbers: Any, _sum_step: Any, _step: Any, _count: Any, vectors: Any, out: Any) -> Any:
    def codegen(context: Any, b: ir.IRBuilder, signature: Any, given: Any) -> Any:
        _, sum_step, step, count, _, _ = given
        (numbers, _, _), (vectors, _, _), (out, _, (num_sums, _)) = (
            array_of(context, b, signature.args[place], given[place]) for place in (0, 4, 5)
        )
        sum_bytes, step_bytes = (b.mul(size, ir.Constant(I64, _BYTES)) for size in (sum_step, step))
        vector_bytes, held = ir.Constant(I64, _BYTES * LANES), [cgutils.alloca_once(b, FLOATS) for _ in range(SUMS)]
        with cgutils.for_range_slice(b, ir.Constant(I64, 0), num_sums, ir.Constant(I64, SUMS)) as (first, _):
            places = spaced(b, at(b, out, b.mul(first, vector_bytes)), vector_bytes, SUMS)
            for place, sums in zip(places, held, strict=True):
                b.store(b.load(place, typ=FLOATS, align=_BYTES), sums)
            begin = at(b, numbers, b.mul(first, sum_bytes))
            with cgutils.for_range(b, count) as i:
                vector = b.load(at(b, vectors, b.mul(i.index, vector_bytes)), typ=FLOATS, align=_BYTES)
                here = at(b, begin, b.mul(i.index, step_bytes))
                for place, sums in zip(spaced(b, here, sum_bytes, SUMS), held, strict=True):
                    number = splat(b, b.load(place, typ=ir.FloatType(), align=_BYTES))
                    b.store(llvm_vectors.multiply_add(b, b.load(sums), vector, number), sums)
            for place, sums in zip(places, held, strict=True):
                llvm_vectors.store(b, b.load(sums), place)
        return context.get_dummy_value()

    return types.void(numbers, types.intp, types.intp, types.intp, vectors, out), codegen


# add_products(numbers, sum_step, step, count, vectors, out): out[j] += vectors[i] * numbers[j * sum_step + i * step]
# for i = 0 to count - 1, in this order. Arrays are contiguous float32; `out` has SUMS vectors or more.
add_products: Any = intrinsic(_add_products)
load: Any = intrinsic(_load_row)  # load(array, index)
store: Any = intrinsic(_store_row)  # store(array, index, vector); the array's numbers have 4 bytes
all_lanes: Any = intrinsic(_same)  # a float32 or int32 in all lanes
multiply_add: Any = _of_three(_called("fma"))  # first * second + third, rounded once
larger: Any = _of_two(_called("maxnum"))
magnitude: Any = _of_one(_called("fabs"))
square_root: Any = _of_one(_called("sqrt"))
nearest: Any = _of_one(_nearest, _WORDS)  # rounded to int32
exp_below_zero: Any = _of_one(llvm_vectors.exp_below_zero)  # exp(x) for x <= 0
pair: Any = _of_two(_pair, _WORDS)  # words of two numbers rounded to bfloat16
bits: Any = _of_one(llvm_vectors.rounded, _BITS)  # bits of numbers rounded to bfloat16
where_positive: Any = _of_three(
    lambda builder, numbers, then, otherwise: builder.select(
        builder.fcmp_ordered(">", numbers, ir.Constant(FLOATS, [0.0] * LANES)), then, otherwise
    )
)


def _define(function: Any, of_floats: str | None, of_words: str | None) -> None:
    """Define an operator on vectors by names of llvmlite builder methods, for float32 and for int32."""
    names = {_FLOATS: of_floats, _WORDS: of_words}
    codes = {
        kind: _of_two(lambda builder, first, second, name=name: getattr(builder, name)(first, second))
        for kind, name in names.items()
        if name is not None
    }

    @overload(function)
    def defined(first, second):  # type: (Any, Any) -> Any
        if not isinstance(first, Lanes) or first != second or first not in codes:
            return None
        code = codes[first]
        return lambda first, second: code(first, second)


for _function, *_names in (
    (operator.add, "fadd", "add"),
    (operator.sub, "fsub", "sub"),
    (operator.mul, "fmul", "mul"),
    (operator.truediv, "fdiv", None),
    (operator.and_, None, "and_"),
    (operator.or_, None, "or_"),
    (operator.lshift, None, "shl"),
):
    _define(_function, *_names)
