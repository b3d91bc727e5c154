"""What registers of tiles do, in instructions that every processor has: to test code for those where there are none.

Written from the operation of TDPBF16PS, TDPBSUD, TILELOADD and TILESTORED in Intel's manual, in place of the functions
of `bough.model.cpu.amx` that write their instructions.
"""

from __future__ import annotations

from typing import Any

import pytest
from llvmlite import ir
from numba.core import cgutils

from bough.model.cpu import amx, llvm_vectors
from bough.model.cpu.amx import NUM_TILES, ROW_BYTES, ROWS, TILE_BYTES
from bough.model.cpu.llvm_vectors import FLOATS, I32, I64, LANES, WORDS, at, splat

_STATE = "emulated tiles"


def _tile(b: ir.IRBuilder, number: int) -> Any:
    """Where it stands; tiles are the module's, as a thread's registers are everybody's."""
    kind = ir.ArrayType(ir.IntType(8), NUM_TILES * TILE_BYTES)
    if _STATE not in b.module.globals:
        made = ir.GlobalVariable(b.module, kind, _STATE)
        made.initializer, made.linkage, made.align = ir.Constant(kind, None), "internal", 64
    return at(b, b.module.globals[_STATE], ir.Constant(I64, number * TILE_BYTES))


def _row(b: ir.IRBuilder, tile: int, row: Any) -> Any:
    return at(b, _tile(b, tile), b.mul(row, ir.Constant(I64, ROW_BYTES)))


def _over_rows(b: ir.IRBuilder) -> Any:
    return cgutils.for_range(b, ir.Constant(I64, ROWS), intp=I64)


def clear(b: ir.IRBuilder, tile: int) -> None:
    with _over_rows(b) as loop:
        llvm_vectors.store(b, ir.Constant(WORDS, [0] * LANES), _row(b, tile, loop.index))


def load(b: ir.IRBuilder, tile: int, address: Any, step: Any) -> None:
    with _over_rows(b) as loop:
        source = at(b, address, b.mul(loop.index, step))
        llvm_vectors.store(b, b.load(source, typ=WORDS, align=2), _row(b, tile, loop.index))


def store(b: ir.IRBuilder, tile: int, address: Any) -> None:
    with _over_rows(b) as loop:
        target = at(b, address, b.mul(loop.index, ir.Constant(I64, ROW_BYTES)))
        llvm_vectors.store(b, b.load(_row(b, tile, loop.index), typ=WORDS, align=4), target)


def add_pairs(b: ir.IRBuilder, sums: int, first: int, second: int) -> None:
    parts = [cgutils.alloca_once(b, FLOATS) for _ in range(2)]
    with _over_rows(b) as m:
        for part in parts:
            b.store(ir.Constant(FLOATS, [0.0] * LANES), part)
        with _over_rows(b) as k:
            word = at(b, _row(b, first, m.index), b.mul(k.index, ir.Constant(I64, 4)))
            one = llvm_vectors.widened(b, splat(b, b.load(word, typ=I32, align=4)))
            other = llvm_vectors.widened(b, b.load(_row(b, second, k.index), typ=WORDS, align=4))
            for part, *factors in zip(parts, one, other, strict=True):
                b.store(llvm_vectors.multiply_add(b, b.load(part), *factors), part)
        place = _row(b, sums, m.index)
        together = b.fadd(b.load(parts[0]), b.load(parts[1]))
        llvm_vectors.store(b, b.fadd(b.load(place, typ=FLOATS, align=4), together), place)


def add_fours(b: ir.IRBuilder, sums: int, signed: int, unsigned: int) -> None:
    def constant(number: int) -> ir.Constant:
        return ir.Constant(WORDS, [number] * LANES)

    with _over_rows(b) as m, _over_rows(b) as k:
        word = at(b, _row(b, signed, m.index), b.mul(k.index, ir.Constant(I64, 4)))
        one, place = splat(b, b.load(word, typ=I32, align=4)), _row(b, sums, m.index)
        other, total = b.load(_row(b, unsigned, k.index), typ=WORDS, align=4), b.load(place, typ=WORDS, align=4)
        for byte in range(4):
            with_sign = b.ashr(b.shl(one, constant(24 - 8 * byte)), constant(24))
            without = b.and_(b.lshr(other, constant(8 * byte)), constant(0xFF))
            total = b.add(total, b.mul(with_sign, without))
        llvm_vectors.store(b, total, place)


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends what is compiled has these in place of instructions."""
    for function in (clear, load, store, add_pairs, add_fours):
        monkeypatch.setattr(amx, function.__name__, function)
    for name in ("begin", "end"):
        monkeypatch.setattr(amx, name, lambda _builder: None)
