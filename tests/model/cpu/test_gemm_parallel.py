"""Products by all threads, of many rows and of few, into rows and into lanes."""

from __future__ import annotations

import ctypes
import mmap

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.model.cpu import gemm, gemm_parallel, jit, llvm_vectors, work_stealing
from bough.model.cpu.gemm import GROUP
from bough.model.cpu.linear import numbers
from bough.model.cpu.llvm_vectors import LANES
from bough.model.cpu.work_stealing import counters
from tests.fakes.products import project

lay_out, take = (jit.strict(function.py_func) for function in (gemm.lay_out, work_stealing._take))


def random_numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def words_of(rows: torch.Tensor) -> np.ndarray:
    return (rows.view(torch.int32) if rows.dtype == torch.bfloat16 else rows).numpy()


def blocks_of(rows: torch.Tensor) -> np.ndarray:
    words = words_of(rows)
    blocks = np.zeros((-(-len(rows) // LANES), words.shape[1], LANES), words.dtype)
    for block in range(len(blocks)):
        lay_out(words, block, blocks)
    return blocks


@pytest.mark.slow
@given(
    seed=st.integers(0, 1000),
    num_rows=st.sampled_from([1, 2, 4, 8, 13, 16, 40, 70]),
    outputs=st.integers(GROUP, 90),
    lines=st.integers(1, 9),
)
def test_products_of_any_number_of_rows(seed: int, num_rows: int, outputs: int, lines: int) -> None:
    rows, matrix = random_numbers(seed, num_rows, 32 * lines), random_numbers(seed + 1, outputs, 32 * lines)
    bias, bits = random_numbers(seed + 2, outputs).float(), matrix.view(torch.uint16).numpy()
    right = (rows.double() @ matrix.double().t()).numpy()
    blocks, whole_blocks = blocks_of(rows), -(-num_rows // LANES) * LANES
    out = np.full((whole_blocks, outputs), np.nan, np.float32)
    project(counters(2)[0], 2, blocks, num_rows, bits, bias.numpy(), out)
    np.testing.assert_allclose(out[:num_rows], right + bias.numpy(), rtol=1e-4, atol=1e-3)
    whole = outputs // GROUP * GROUP
    lanes = np.ones((len(blocks), whole, LANES), np.float32)
    project(counters(2)[0], 2, blocks, num_rows, bits[:whole], None, lanes)
    sums = lanes.transpose(0, 2, 1).reshape(-1, whole)[:num_rows]
    np.testing.assert_allclose(sums, 1 + right[:, :whole], rtol=1e-4, atol=1e-3)


@given(seed=st.integers(0, 1000), num_rows=st.integers(1, 8), outputs=st.integers(GROUP, 90), words=st.integers(1, 70))
def test_few_rows_have_the_bits_of_many(seed: int, num_rows: int, outputs: int, words: int) -> None:
    """For any form of the result, and if inputs do not fill lines."""
    words = 8 * words if seed % 2 else words
    rows, matrix = random_numbers(seed, num_rows, 2 * words), random_numbers(seed + 1, outputs, 2 * words)
    bias, blocks, bits = random_numbers(seed + 2, outputs).float().numpy(), blocks_of(rows), numbers(matrix)
    whole = outputs // GROUP * GROUP
    for kind in (np.float32, np.uint16):
        few, many = (np.zeros((LANES, outputs), kind) for _ in range(2))
        for out, count in ((few, num_rows), (many, LANES)):
            project(counters(2)[0], 2, blocks, count, bits, bias, out)
        assert (few[:num_rows] == many[:num_rows]).all()
    few, many = (np.ones((1, whole, LANES), np.float32) for _ in range(2))
    for out, count in ((few, num_rows), (many, LANES)):
        project(counters(2)[0], 2, blocks, count, bits[:whole], None, out)
    assert (few[:, :, :num_rows] == many[:, :, :num_rows]).all()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_products_of_no_rows_change_nothing(kind: torch.dtype) -> None:
    """Not even where the first row would be: memory that is not the result's."""
    matrix, around = numbers(random_numbers(1, GROUP, 64).to(kind)), np.full((LANES, GROUP), 7, np.float32)
    blocks = blocks_of(random_numbers(2, 0, 64).to(kind))
    project(counters(2)[0], 2, blocks, 0, matrix, np.zeros(GROUP, np.float32), around[:0])
    assert (around == 7).all()


@pytest.mark.parametrize("num_rows", [1, 20])
@pytest.mark.parametrize("words", [1, 7, 15, 16, 17, 33, 70])
def test_nothing_is_read_beyond_the_matrix(words: int, num_rows: int) -> None:
    """Its last number is before memory that cannot be read."""
    matrix = random_numbers(1, GROUP, 2 * words)
    guarded, bits = before_a_wall(numbers(matrix).tobytes()).view(np.uint16).reshape(GROUP, 2 * words), numbers(matrix)
    blocks, bias = blocks_of(random_numbers(2, num_rows, 2 * words)), np.zeros(GROUP, np.float32)
    out, right = (np.zeros((len(blocks) * LANES, GROUP), np.float32) for _ in range(2))
    project(counters(2)[0], 2, blocks, num_rows, guarded, bias, out)
    project(counters(2)[0], 2, blocks, num_rows, bits, bias, right)
    assert (out == right).all()


def before_a_wall(content: bytes) -> np.ndarray:
    """Bytes that end where a page begins which is not to be read."""
    page, size = mmap.PAGESIZE, -(-len(content) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[size - len(content) : size] = content
    whole = np.frombuffer(memory, np.uint8)
    nothing_allowed = 0
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.ctypes.data + size), page, nothing_allowed) == 0
    return whole[size - len(content) : size]


@pytest.mark.parametrize("is_few", [False, True])
def test_products_on_processors_without_the_instruction(is_few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm_vectors, "has_feature", lambda _name: False)
    tile, few = gemm.tile_of(1, GROUP), gemm_parallel._tile_of(8)

    @numba.njit
    def run(rows, matrix, sums):
        if is_few:
            few(rows, matrix, 0, None, sums)
        else:
            tile(rows, 0, matrix, 0, None, sums)

    matrix, rows = random_numbers(0, GROUP, 64), random_numbers(1, 8, 64)
    sums = np.ones((1, GROUP, LANES), np.float32)
    run(rows.float().numpy() if is_few else blocks_of(rows), matrix.view(torch.uint16).numpy(), sums)
    expected = (matrix.double() @ rows.double().T).numpy()
    np.testing.assert_allclose(sums[0, :, :8], 1 + expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_threads", "num_pieces"), [(1, 5), (2, 7), (3, 2), (4, 64)])
def test_each_piece_is_taken_once_at_any_speed_of_threads(num_threads: int, num_pieces: int) -> None:
    taken = counters(num_threads)[0]
    first_of_last = take(taken, num_threads - 1, num_threads, num_pieces)
    alone = [take(taken, 0, num_threads, num_pieces) for _ in range(num_pieces - 1)]
    assert sorted([first_of_last, *alone]) == list(range(num_pieces))
    assert alone == sorted(alone)  # its own share first, in the order in which it is read ahead
    assert {take(taken, thread, num_threads, num_pieces) for thread in range(num_threads)} == {num_pieces}
