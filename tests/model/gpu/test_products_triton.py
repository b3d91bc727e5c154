"""The GPU's matrix products, interpreted: a row's bits depend on that row alone, and packed weights change no bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from bough.model.backend import load
from bough.model.gpu import product_triton, unpack_triton
from bough.model.gpu.unpack_triton import operands
from bough.model.packed import Along, ExpertTiles, Matrix, Packed, Stack, is_transposed
from bough.model.quant.format import Dequantized
from bough.model.quant.formats import SAMPLES
from bough.model.quant.ggml_blocks import TYPES, sample
from tests.fakes.tiers import long_but

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # relative error of a number
OTHERS = {kind: partial(sample, kind) for kind in TYPES if kind not in SAMPLES}
OUTPUTS, INPUTS = 72, 256


def packed(make: Callable[[int, int], Dequantized], seed: int = 0, outputs: int = OUTPUTS) -> Packed:
    source, rng = make(outputs, INPUTS), np.random.default_rng(seed)
    return source.packed(source.random(rng))


def written_out(matrix: Packed, dtype: torch.dtype) -> torch.Tensor:
    outputs, inputs = matrix.shape
    out = (
        torch.empty(inputs, outputs, dtype=dtype).t()
        if is_transposed(matrix)
        else torch.empty(matrix.shape, dtype=dtype)
    )
    unpack_triton.write(matrix, out)
    return out


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).to(dtype)


def assert_close(
    found: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Within one rounding to the type, and as many of float32 as there are inputs."""
    exact = rows.double() @ matrix.double().t() + (0.0 if bias is None else bias.double())
    of_sums = rows.double().abs() @ matrix.double().abs().t() * (matrix.shape[1] * 2.0**-24)
    off = (found.double() - exact).abs()
    assert (off <= exact.abs() * ROUNDING[found.dtype] + of_sums + 2.0**-24).all(), float((off / of_sums).max())


@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], DTYPES), ids=str)
@pytest.mark.parametrize("name", long_but(SAMPLES, SAMPLES | OTHERS))
def test_a_packed_product_has_the_bits_of_the_written_out_matrixs(name: str, dtype: torch.dtype) -> None:
    matrix, rows = packed((SAMPLES | OTHERS)[name]), numbers(5, INPUTS, dtype=dtype)
    weights = written_out(matrix, dtype)
    assert weights.isfinite().all()
    found = product_triton.multiply(rows, matrix)
    assert torch.equal(found, product_triton.multiply(rows, weights))
    assert_close(found, rows, weights)


@pytest.mark.parametrize(
    ("name", "dtype"), long_but([("awq 4 bits", torch.float16)], [(n, d) for n in SAMPLES for d in DTYPES]), ids=str
)
def test_a_row_of_a_packed_product_has_the_same_bits_among_any_others(name: str, dtype: torch.dtype) -> None:
    check_rows(packed(SAMPLES[name]), numbers(256, INPUTS, dtype=dtype))


@pytest.mark.parametrize("name", SAMPLES)
def test_what_kernels_take_of_a_packed_matrix_is_found_once(name: str) -> None:
    """By alignment, and for each value anew; what it keeps does not keep it in memory."""
    matrix = packed(SAMPLES[name])
    found = operands(matrix)
    assert operands(matrix) is found
    assert operands(matrix, 2) is operands(matrix, 2)
    assert operands(packed(SAMPLES[name])) is not found
    gone = weakref.ref(found[0][0])
    del matrix, found
    assert gone() is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_among_any_others(dtype: torch.dtype) -> None:
    check_rows(numbers(40, 192, dtype=dtype, seed=1), numbers(256, 192, dtype=dtype))


def check_rows(matrix: Matrix, rows: torch.Tensor) -> None:
    whole = product_triton.multiply(rows, matrix)
    for begin, count in ((0, 1), (255, 1), (17, 8), (3, 30), (150, 64)):
        found = product_triton.multiply(rows[begin : begin + count], matrix)
        assert torch.equal(found, whole[begin : begin + count]), (begin, count)


@pytest.mark.parametrize("inputs", [192, 200, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_ones_are_exactly_the_number_of_inputs(inputs: int, dtype: torch.dtype) -> None:
    rows, matrix = (torch.ones(count, inputs, dtype=dtype) for count in (3, 160))
    assert (product_triton.multiply(rows, matrix) == inputs).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_sizes_strides_and_biases_are_multiplied(dtype: torch.dtype) -> None:
    rows, bias = numbers(2, 3, 50, dtype=dtype), numbers(37, dtype=dtype, seed=2)
    wide = numbers(50, 80, dtype=dtype, seed=1)
    for matrix in (wide.t()[:37], wide.t().contiguous()[3:40], wide[:37, :50], wide.t()[1:75:2]):
        found = product_triton.multiply(rows, matrix, bias)
        assert_close(found, rows, matrix, bias)
        assert torch.equal(product_triton.multiply(rows, matrix.contiguous(), bias), found)
    assert product_triton.multiply(rows[:0], wide.t()).shape == (0, 3, 80)
    assert product_triton.multiply(rows.transpose(0, 1), wide.t()).shape == (3, 2, 80)


def test_what_is_no_number_stays_none() -> None:
    """A GPU's own NaN has all bits of its mantissa set: rounded as a number in bfloat16 it would be -0."""
    bias = torch.zeros(OUTPUTS)
    bias.view(torch.int32)[5] = 0x7FFFFFFF
    rows, matrix = numbers(2, INPUTS, dtype=torch.bfloat16), numbers(OUTPUTS, INPUTS, dtype=torch.bfloat16)
    assert product_triton.multiply(rows, matrix, bias).isnan().nonzero().tolist() == [[0, 5], [1, 5]]


def test_products_by_head_have_the_bits_of_each_heads() -> None:
    rows, matrices = numbers(5, 3, 40).transpose(0, 1), numbers(3, 40, 33, seed=1).transpose(1, 2)
    found = product_triton.linear_by_head(rows, matrices)
    for head in range(3):
        assert torch.equal(found[:, head], product_triton.multiply(rows[head], matrices[head]))
    assert torch.equal(product_triton.linear_by_head(rows[:, 2:3], matrices), found[2:3])
    assert torch.equal(product_triton.linear_by_head(rows, matrices.contiguous()), found)


def tiles_of(chosen: torch.Tensor, num_experts: int) -> ExpertTiles:
    """As the GPU's backend makes them."""
    experts, choices = torch.sort(chosen.flatten(), stable=True)
    return product_triton.expert_tiles(experts, choices, chosen.shape[1], num_experts)


@pytest.mark.parametrize("name", long_but(["16 bits", "mxfp4 4 bits"], ["16 bits", *SAMPLES]))
def test_products_by_expert_have_the_bits_of_each_experts(name: str) -> None:
    num_experts, outputs, dtype = 4, 40, torch.float16
    chosen = torch.tensor([[0, 3], [3, 1], [3, 0], [1, 3], [3, 4]])  # 2 is not chosen; 4 is no choice
    plain = [numbers(outputs, INPUTS, dtype=dtype, seed=seed) for seed in range(num_experts)]
    matrices: list[Matrix | None] = list(plain)
    if name in SAMPLES:
        matrices = [packed(SAMPLES[name], seed, outputs) for seed in range(num_experts)]
    matrices[2] = None
    biases = [numbers(outputs, dtype=dtype, seed=9 + seed) for seed in range(num_experts)]
    rows, tiles, stack = numbers(5, INPUTS, dtype=dtype), tiles_of(chosen, num_experts), Stack.of(matrices, biases)
    found = product_triton.multiply_grouped(rows, stack, tiles)
    by_torch = load("reference").multiply_grouped(rows, stack, tiles)
    for choice, entry in enumerate(tiles.entries.tolist()[:9]):
        expert, own = int(chosen.flatten()[choice]), rows[choice // 2 :][:1]
        matrix = matrices[expert]
        assert matrix is not None
        wanted = product_triton.multiply(own, matrix, biases[expert])[0]
        assert torch.equal(found[entry], wanted), (entry, expert)
        assert torch.allclose(by_torch[entry], wanted, rtol=2e-3, atol=2e-3)
    again = product_triton.multiply_grouped(rows[tiles.places.long()], stack, tiles, is_sorted=True)
    assert torch.equal(again[:9], found[:9])


def test_programs_have_few_rows_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 would not fit in registers. Tiles of experts, which are of any type, are cut."""
    counts, constants = [], product_triton._constants
    monkeypatch.setattr(product_triton, "_constants", lambda rows, *of: counts.append(rows) or constants(rows, *of))
    rows, matrices = numbers(150, 64), [numbers(40, 64, seed=seed) for seed in range(2)]
    tiles = tiles_of((torch.arange(150) >= 3).long()[:, None], 2)
    found = product_triton.multiply_grouped(rows, Stack.of(matrices), tiles)
    assert torch.equal(found[:3], product_triton.multiply(rows[:3], matrices[0]))
    assert torch.equal(found[3:], product_triton.multiply(rows[3:], matrices[1]))
    assert torch.equal(product_triton.linear_by_head(rows[None], matrices[1][None])[3:, 0], found[3:])
    assert set(counts) == {16, 32}


@pytest.mark.parametrize(
    ("num_rows", "k", "num_experts"), [(1, 2, 8), (3, 1, 1), (40, 4, 8), (100, 2, 3), (64, 8, 128), (200, 1, 2)]
)
def test_every_entry_is_in_one_tile_of_its_expert(num_rows: int, k: int, num_experts: int) -> None:
    rng = np.random.default_rng(num_rows)
    chosen = np.minimum(rng.integers(0, num_experts + 1, (num_rows, k)), rng.integers(0, num_experts + 1))
    tiles = tiles_of(torch.from_numpy(chosen), num_experts)
    entries, most = np.empty(chosen.size, np.int64), product_triton.rows_of_tile(chosen.size, num_experts)
    entries[tiles.entries.numpy()] = chosen.flatten()
    assert tiles.places[tiles.entries].tolist() == [row for row in range(num_rows) for _ in range(k)]
    seen = []
    for expert, begin, end in tiles.table.tolist():
        assert 0 <= end - begin <= most
        assert (entries[begin:end] == expert).all()
        seen += range(begin, end)
    assert sorted(seen) == list(range((chosen < num_experts).sum())), "each once, and none that is no choice"


def test_a_missing_group_reads_nothing_beyond_the_table() -> None:
    matrix = packed(SAMPLES["gptq 4 bits by g_idx"])
    assert not isinstance(matrix, Along)
    matrix.groups[:2] = torch.tensor([1_000_000, -5], dtype=torch.int32)
    assert product_triton.multiply(numbers(1, INPUTS), matrix).isfinite().all()
