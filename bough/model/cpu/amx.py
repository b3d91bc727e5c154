"""Intel's registers of tiles (AMX) in LLVM's terms.

A tile is sixteen rows of 64 bytes. One instruction multiplies one tile with another as matrices, and adds to a third:
8,192 products of bfloat16, or 16,384 of bytes. Instructions: Intel 64 and IA-32 Architectures Software Developer's
Manual, volume 2, "TDPBF16PS" and others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from bough.model import may_use_tiles
from bough.model.cpu.llvm_vectors import I64, POINTER, at, call, has_feature

ROWS, ROW_BYTES = 16, 64  # of a tile
TILE_BYTES = ROWS * ROW_BYTES
NUM_TILES = 8
FEATURES = "amx-tile", "amx-bf16", "amx-int8"
_I8 = ir.IntType(8)


def has_tiles() -> bool:
    """Whether this processor has them, and the system lets this process use them."""
    return all(map(has_feature, FEATURES)) and may_use_tiles()


def _configuration() -> bytes:
    """All tiles of full size."""
    made = np.zeros(64, np.uint8)
    made[0] = 1  # the only palette with tiles
    made[16 : 16 + 2 * NUM_TILES].view(np.uint16)[:] = ROW_BYTES
    made[48 : 48 + NUM_TILES] = ROWS
    return made.tobytes()


def begin(b: ir.IRBuilder) -> None:
    """Before a thread uses tiles."""
    content = ir.Constant(ir.ArrayType(_I8, 64), bytearray(_configuration()))
    name = "bough.tiles"
    if name in b.module.globals:
        made = b.module.globals[name]
    else:
        made = ir.GlobalVariable(b.module, content.type, name)
        made.initializer, made.linkage, made.global_constant, made.align = content, "internal", True, 64
    _call(b, "ldtilecfg", made)


def end(b: ir.IRBuilder) -> None:
    """After it: whoever switches threads then need not keep them."""
    _call(b, "tilerelease")


def clear(b: ir.IRBuilder, tile: int) -> None:
    """Makes it all zeros."""
    _call(b, "tilezero", ir.Constant(_I8, tile))


def load(b: ir.IRBuilder, tile: int, address: Any, step: Any) -> None:
    """Rows that stand `step` bytes apart."""
    _call(b, "tileloadd64", ir.Constant(_I8, tile), address, step)


def store(b: ir.IRBuilder, tile: int, address: Any) -> None:
    """Rows one after another."""
    _call(b, "tilestored64", ir.Constant(_I8, tile), address, ir.Constant(I64, ROW_BYTES))


def add_pairs(b: ir.IRBuilder, sums: int, first: int, second: int) -> None:
    """sums[m, n] += the dot product of first[m, k] and second[k, n] over k: pairs of bfloat16, into float32.

    Those that are first in their pairs are added up apart from those that are second; numbers too small for their
    exponent count as 0.
    """
    _call(b, "tdpbf16ps", *(ir.Constant(_I8, tile) for tile in (sums, first, second)))


def add_fours(b: ir.IRBuilder, sums: int, signed: int, unsigned: int) -> None:
    """The same of fours of bytes, into int32; the first have signs and the second none."""
    _call(b, "tdpbsud", *(ir.Constant(_I8, tile) for tile in (sums, signed, unsigned)))


def rows_at(b: ir.IRBuilder, address: Any, kind: ir.Type) -> list[Any]:
    """A tile that was stored, as a vector for each row."""
    places = [at(b, address, ir.Constant(I64, ROW_BYTES * row)) for row in range(ROWS)]
    return [b.load(place, typ=kind, align=ROW_BYTES) for place in places]


def _call(b: ir.IRBuilder, name: str, *arguments: Any) -> None:
    kinds = [POINTER if isinstance(argument.type, ir.PointerType) else argument.type for argument in arguments]
    kind = ir.FunctionType(ir.VoidType(), kinds)
    call(b, f"llvm.x86.{name}", kind, arguments)
