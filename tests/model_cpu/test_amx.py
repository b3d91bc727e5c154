"""Products by registers of tiles: what they compute with tiles emulated, and which instructions they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

from bough import model
from bough.model.cpu import amx, amx_tiles
from bough.model.cpu.gemm import GROUP, multiply_groups
from bough.model.cpu.gemm_int8 import multiply_int8
from bough.model.cpu.gemm_parallel import HAS_TILES
from bough.model.cpu.linear import numbers
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.operands import LINE
from tests.fakes.emulated_tiles import emulate
from tests.model_cpu.test_int8 import matrix_of, rows_of
from tests.model_cpu.test_project import blocks_of, random_numbers

Function = Any  # compiled


@pytest.fixture(scope="module")
def in_16_bits() -> Function:
    """Compiled anew, with tiles emulated; what is kept on disk is for processors that have them."""
    return emulated(amx_tiles.multiply_groups_by_tiles)


@pytest.fixture(scope="module")
def in_8_bits() -> Function:
    return emulated(amx_tiles.multiply_int8_by_tiles)


def emulated(function: Function) -> Function:
    made = numba.njit(function.py_func, error_model="numpy")

    def run(*arguments: object) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            emulate(monkeypatch)
            made(*arguments)

    return run


@pytest.mark.parametrize("num_rows", [1, 16, 17, 40, 64, 112])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (90, 96), (64, 320), (40, 48)])
def test_many_rows_in_16_bits(in_16_bits: Function, num_rows: int, outputs: int, inputs: int) -> None:
    """Small whole numbers, whose sums are exact in whichever order: the bits are those of vectors, in every form."""
    generator = torch.Generator().manual_seed(num_rows * outputs)
    rows, matrix = (torch.randint(-8, 9, (n, inputs), generator=generator).bfloat16() for n in (num_rows, outputs))
    blocks, bits, groups = blocks_of(rows), numbers(matrix), -(-outputs // GROUP)
    bias = random_numbers(1, outputs).float().numpy()
    for kind in (np.float32, np.uint16):
        outs = [np.zeros((len(blocks) * LANES, outputs), kind) for _ in range(2)]
        for function, out in zip((in_16_bits, multiply_groups), outs, strict=True):
            function(blocks, bits, 0, groups, bias, out)
        assert (outs[0] == outs[1]).all()
        assert outs[0].any()
    whole = outputs // GROUP
    lanes = [np.ones((len(blocks), whole * GROUP, LANES), np.float32) for _ in range(2)]
    for function, out in zip((in_16_bits, multiply_groups), lanes, strict=True):
        function(blocks, bits[: whole * GROUP], 0, whole, None, out)
    assert (lanes[0] == lanes[1]).all()


def test_a_row_in_16_bits_knows_of_no_other(in_16_bits: Function) -> None:
    """The same bits alone and at any place among others; near those of float64."""
    rows, matrix = random_numbers(1, 100, 288), random_numbers(2, 48, 288)
    bits, bias = numbers(matrix), np.zeros(48, np.float32)

    def product(some: torch.Tensor) -> np.ndarray:
        blocks = blocks_of(some)
        out = np.zeros((len(blocks) * LANES, 48), np.float32)
        in_16_bits(blocks, bits, 0, 3, bias, out)
        return out[: len(some)]

    together = product(rows)
    np.testing.assert_allclose(together, (rows.double() @ matrix.double().t()).numpy(), rtol=1e-4, atol=1e-3)
    for row in (0, 15, 16, 63, 64, 99):
        assert (product(rows[row : row + 1])[0] == together[row]).all()
    assert (product(rows[37:]) == together[37:]).all()


@pytest.mark.parametrize("num_rows", [1, 8, 9, 16, 17, 40])
def test_rows_in_8_bits_have_the_bits_of_vectors(in_8_bits: Function, num_rows: int) -> None:
    lines, outputs = 1 + num_rows % 4, 70
    values, weights = (torch.randn(n, LINE * lines, generator=torch.Generator().manual_seed(n)) for n in (num_rows, 70))
    rows, matrix = rows_of(values), matrix_of(weights)
    codes = amx_tiles.codes_by_row(rows, num_rows)
    assert (len(codes) > 0) == (num_rows > amx_tiles.MOST_BY_VECTORS)
    width = len(matrix) * LANES
    bias = random_numbers(3, width).float().numpy()
    outs = [np.zeros((len(rows) * LANES, width), np.float32) for _ in range(2)]
    lanes = [np.ones((len(rows), width, LANES), np.float32) for _ in range(2)]
    for together, added in ((outs, bias), (lanes, None)):
        in_8_bits(rows, codes, num_rows, matrix, 0, len(matrix), added, together[0])
        multiply_int8(rows, num_rows, matrix, 0, len(matrix), added, together[1])
    assert (outs[0][:num_rows] == outs[1][:num_rows]).all()
    assert np.abs(outs[0][:num_rows, :outputs]).min() > 0
    by_rows = [array.transpose(0, 2, 1).reshape(-1, width)[:num_rows] for array in lanes]
    assert (by_rows[0] == by_rows[1]).all()


def test_tiles_that_compute_something_else_are_not_used(in_16_bits: Function, in_8_bits: Function) -> None:
    assert amx_tiles.are_right(in_16_bits, in_8_bits)

    def wrong(*arguments: Any) -> None:
        in_8_bits(*arguments)
        arguments[-1][3, 5] += 1

    assert not amx_tiles.are_right(in_16_bits, wrong)
    assert not amx_tiles.are_right(lambda *_: None, in_8_bits)


@pytest.mark.skipif(not HAS_TILES, reason="this processor has no tiles, or the system refuses them")
def test_real_tiles_have_the_bits_of_emulated_ones(in_16_bits: Function) -> None:
    blocks, matrix = blocks_of(random_numbers(1, 50, 320)), numbers(random_numbers(2, 64, 320))
    outs = [np.zeros((len(blocks) * LANES, 64), np.float32) for _ in range(2)]
    for function, out in zip((in_16_bits, amx_tiles.multiply_groups_by_tiles), outs, strict=True):
        function(blocks, matrix, 0, 4, np.zeros(64, np.float32), out)
    assert (outs[0] == outs[1]).all()


# A process of its own: for which processor numba compiles is decided once in each.
COMPILE = """
import numba
from numba import types
from bough.model import amx_tiles

def assembly(function, *arguments):
    made = numba.njit(function.py_func, error_model="numpy")
    made.compile(arguments)
    return made.inspect_asm(made.signatures[0])

def array(kind, ndim):
    return types.Array(kind, ndim, "C")

rows, matrix, out = array(types.int32, 3), array(types.uint16, 2), array(types.float32, 2)
bias, size = array(types.float32, 1), types.int64
print(assembly(amx_tiles.multiply_groups_by_tiles, rows, matrix, size, size, bias, out))
rows, codes, matrix, out = (array(*kind) for kind in
    ((types.uint32, 3), (types.uint32, 4), (types.int32, 3), (types.float32, 3)))
print(assembly(amx_tiles.multiply_int8_by_tiles, rows, codes, size, matrix, size, size, types.none, out))
"""


def test_kernels_are_compiled_to_the_instructions_of_the_manual(tmp_path: Path) -> None:
    """For a processor that has them: what is compiled does not run here."""
    wide = "avx2 fma avx512f avx512bw avx512dq avx512vl avx512bf16 avx512vnni"
    features = [*wide.split(), *amx.FEATURES]
    processor = {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in features),
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", COMPILE]
    run = subprocess.run(command, env={**os.environ, **processor}, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    lines = [line.strip().replace("\t", " ") for line in run.stdout.splitlines()]
    tiles = [line for line in lines if line.startswith(("ldtilecfg", "tile", "tdp"))]
    names = [line.split()[0] for line in tiles]
    four_blocks = ["tilezero"] * 4 + ["tileloadd", *["tileloadd", "tdpbf16ps"] * 4] + ["tilestored"] * 4
    assert names[: 1 + len(four_blocks)] == ["ldtilecfg", *four_blocks]
    in_8_bits = ["ldtilecfg", "tilezero", "tileloadd", "tileloadd", "tdpbsud", "tilestored", "tilerelease"]
    assert names[-len(in_8_bits) :] == in_8_bits
    assert names.count("tilerelease") == names.count("ldtilecfg") == 2
    # The tile of the sums comes last in this notation, and the first factor's before it.
    assert "tdpbf16ps %tmm5, %tmm4, %tmm3" in tiles
    assert "tdpbsud %tmm5, %tmm4, %tmm0" in tiles


def test_a_system_that_refuses_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that were compiled elsewhere, with tiles, are not taken over then."""
    monkeypatch.setattr(numba.config, "CPU_FEATURES", ",".join(f"+{name}" for name in amx.FEATURES))
    folders = set()
    for is_permitted in (True, False):
        for module in (model, amx):
            monkeypatch.setattr(module, "may_use_tiles", lambda answer=is_permitted: answer)
        assert amx.has_tiles() == is_permitted
        folders.add(model.compiled_folder())
    assert len(folders) == 2
