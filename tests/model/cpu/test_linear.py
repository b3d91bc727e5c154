"""Products of rows: correct, and with the same bits for a row in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.model.cpu.gemm import WORD_BYTES
from bough.model.cpu.linear import DTYPES, can_multiply, multiply
from bough.model.cpu.llvm_vectors import LANES
from bough.model.running.batch_invariance import STEP
from bough.model.threads import WHOLE, all_threads, compute_reproducibly_with

pytestmark = pytest.mark.skipif(not can_multiply(64, torch.float32), reason="this processor lacks multiply-add")


def matrices(seed: int, num_rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (num_rows, inputs), (outputs, inputs), (outputs,)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(0, 5 * LANES + 3),
    outputs=st.integers(1, 70),
    words=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)
def test_products_equal_the_reference(
    seed: int, num_rows: int, outputs: int, words: int, dtype: torch.dtype, has_bias: bool
) -> None:
    rows, matrix, bias = matrices(seed, num_rows, outputs, words * WORD_BYTES // dtype.itemsize, dtype)
    mine = multiply(rows, matrix, bias if has_bias else None)
    right = rows.double() @ matrix.double().t() + (bias.double() if has_bias else 0)
    torch.testing.assert_close(mine, right.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


@given(
    seed=st.integers(0, 1000),
    cuts=st.lists(st.integers(0, 90), max_size=6),
    outputs=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
)
def test_rows_do_not_affect_each_other(seed: int, cuts: list[int], outputs: int, dtype: torch.dtype) -> None:
    """Any cutting of 90 rows into products gives the bits of the whole."""
    rows, matrix, bias = matrices(seed, 90, outputs, 128, dtype)
    whole = multiply(rows, matrix, bias)
    ends = sorted({0, *cuts, 90})
    parts = [multiply(rows[begin:end], matrix, bias) for begin, end in pairwise(ends)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    rows, matrix, bias = matrices(1, 70, 200, 256, dtype)
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        alone = multiply(rows, matrix, bias)
    finally:
        numba.set_num_threads(before)
    assert torch.equal(multiply(rows, matrix, bias), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_are_kept_and_unaligned_addresses_read(dtype: torch.dtype) -> None:
    """safetensors promises no alignment beyond a number's own, and a slice begins anywhere."""
    rows, matrix, bias = matrices(2, 12, 24, 64, dtype)
    held = torch.empty(matrix.numel() + 1, dtype=dtype)
    shifted = held[1:].view(matrix.shape).copy_(matrix)
    assert torch.equal(multiply(rows.view(1, 12, 64), shifted, bias)[0], multiply(rows, matrix, bias))
    assert multiply(rows.view(3, 4, 64), matrix, None).shape == (3, 4, 24)
    assert torch.equal(multiply(rows, matrix.t().contiguous().t(), bias), multiply(rows, matrix, bias))


def test_operands_that_cannot_be_multiplied_are_refused() -> None:
    assert not can_multiply(64, torch.float16)
    assert not can_multiply(41, torch.bfloat16)
    assert can_multiply(41, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_are_kept(dtype: torch.dtype) -> None:
    rows, matrix, _ = matrices(3, 5, 16, 64, dtype)
    rows[2, 7] = float("nan")
    result = multiply(rows, matrix, None)
    assert result[2].isnan().all()
    assert result[[0, 1, 3, 4]].isfinite().all()


ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu, tanh": lambda rows: torch.nn.functional.gelu(rows, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "rms": lambda rows: rows * torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(rows.dtype),
    "softmax": lambda rows: rows.float().softmax(-1),
}


@pytest.fixture
def three_threads() -> Iterator[None]:
    before, before_numba = torch.get_num_threads(), numba.get_num_threads()
    compute_reproducibly_with(3)
    yield
    torch.set_num_threads(before)
    numba.set_num_threads(before_numba)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torch_splits_between_rows(name: str, dtype: torch.dtype) -> None:
    """With three threads of torch's own, silu of this has other bits: so batch_invariance computes it with one."""
    assert torch.get_num_threads() == WHOLE
    rows = matrices(4, 64, 1, 1408, dtype)[0] * 3
    whole = ELEMENTWISE[name](rows)
    rng = np.random.default_rng(5)
    for _ in range(20):
        count = STEP * int(rng.integers(1, 17))
        chosen = torch.from_numpy(rng.permutation(64)[:count])
        assert torch.equal(ELEMENTWISE[name](rows[chosen]), whole[chosen])


@pytest.mark.usefixtures("three_threads")
def test_a_librarys_products_use_all_threads() -> None:
    with all_threads():
        assert torch.get_num_threads() == numba.get_num_threads()
    assert torch.get_num_threads() == WHOLE
