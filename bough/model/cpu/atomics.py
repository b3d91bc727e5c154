"""Atomic counters for compiled code that runs in several threads."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from bough.model.cpu.jit import strict_inner
from bough.model.cpu.llvm_vectors import I32, I64, call, has_feature

APART = 8  # distance between counters in int64: no two share a cache line
_SPINS = 2000  # reads of a counter, some tens of microseconds, before a waiting thread yields


def _counter(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
    return context.make_array(signature.args[0])(context, builder, values[0]).data


def _add_one(_context: Any, counter: Any) -> Any:
    """Atomically add 1 and return the old value; a thread that reads the new value sees all earlier writes."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", _counter(context, builder, signature, values), ir.Constant(I64, 1), "release")

    return numba.types.int64(counter), codegen


def _read(_context: Any, counter: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_counter(context, builder, signature, values), "acquire", 8)

    return numba.types.int64(counter), codegen


def _pause(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        if has_feature("sse2"):
            call(builder, "llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), []), [])
        return context.get_dummy_value()

    return numba.types.void(), codegen


def _let_others_run(_context: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield"), [])
        return context.get_dummy_value()

    return numba.types.void(), codegen


add_one: Any = intrinsic(_add_one)  # to the first entry of an array
seen: Any = intrinsic(_read)  # atomic read of the first entry of an array
_pause_once: Any = intrinsic(_pause)
_yield: Any = intrinsic(_let_others_run)


@strict_inner
def wait_a_moment(spins: Any) -> Any:
    """Pause between two reads of a counter; `spins` is the number of pauses before. Returns spins + 1."""
    _pause_once()
    if spins > _SPINS:
        _yield()
    return spins + 1
