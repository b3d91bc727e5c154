"""Products in 8 bits, and a draft that is run with them."""

from __future__ import annotations

from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import GemmaConfig, LlamaConfig

from bough.errors import ConfigError
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.cpu import gemm_int8, llvm_vectors
from bough.model.cpu.llvm_vectors import LANES, MOST_SIGNED
from bough.model.cpu.operands import LINE, LINE_WORDS, MOST, ZERO, put
from bough.model.cpu.work_stealing import counters
from bough.model.kv.session_kv import KVSlot
from bough.model.llama.decoder import Int8Stack
from bough.model.llama.weights import code_rows, num_blocks
from bough.model.running.runner import ResidentModel
from bough.trees.tree import Tree
from draft_worker.model.sources import load_draft
from loadtest.common.tiny_model import TINY, save_model
from tests.fakes.model.llama import CONTEXT, FAMILIES, SIZES, TREE, perturbed
from tests.fakes.models import CPU
from tests.fakes.products import project

Numbers = NDArray[np.float64]
GEMMA = SIZES | {"head_dim": 16, "intermediate_size": 2 * LINE}


@numba.njit
def put_line(values, rows, block, begin):
    put(values, rows, block, begin)


def rows_of(numbers: torch.Tensor) -> np.ndarray:
    """(num_rows, inputs) as rows of products in 8 bits."""
    num_rows, num_inputs = numbers.shape
    padded = torch.zeros(num_blocks(num_rows) * LANES, num_inputs)
    padded[:num_rows] = numbers
    rows = code_rows(num_blocks(num_rows), num_inputs)
    for block in range(len(rows)):
        lanes = padded[block * LANES : (block + 1) * LANES].t().contiguous().numpy()
        for begin in range(0, num_inputs, LINE):
            put_line(lanes[begin : begin + LINE], rows, block, begin)
    return rows


def row_numbers(rows: np.ndarray, num_rows: int) -> Numbers:
    """The values of codes of rows."""
    lines = (
        rows.reshape(len(rows), -1, LINE_WORDS, LANES)
        .transpose(0, 3, 1, 2)
        .reshape(-1, rows.shape[1] // LINE_WORDS, LINE_WORDS)
    )
    codes = np.ascontiguousarray(lines[:, :, : LINE // 4]).view(np.int8).astype(np.int64)
    scales, offsets = (
        np.ascontiguousarray(lines[:, :, LINE // 4]).view(np.float32),
        np.ascontiguousarray(lines[:, :, LINE // 4 + 1]).view(np.int32),
    )
    assert (offsets == -ZERO * codes.sum(axis=2)).all()
    return (codes * scales[:, :, None].astype(np.float64)).reshape(len(lines), -1)[:num_rows]


def matrix_numbers(matrix: np.ndarray, num_outputs: int) -> Numbers:
    """The values of codes of a matrix."""
    codes = np.ascontiguousarray(matrix[:, :-1].transpose(0, 2, 1)).view(np.uint8).astype(np.float64) - ZERO
    scales = np.ascontiguousarray(matrix[:, -1]).view(np.float32).astype(np.float64)
    return (codes * scales[:, :, None]).reshape(-1, codes.shape[2])[:num_outputs]


def matrix_of(numbers: torch.Tensor) -> np.ndarray:
    stack = Int8Stack(1)
    stack.put(numbers)
    return stack.matrices[0]


def random_numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@given(
    seed=st.integers(0, 1000),
    num_rows=st.sampled_from([1, 2, 3, 4, 7, 8, 13, 16, 40]),
    outputs=st.integers(1, 90),
    lines=st.integers(1, 6),
)
def test_products_of_any_number_of_rows(seed: int, num_rows: int, outputs: int, lines: int) -> None:
    """Those of the codes' values, which are close to the original numbers; a row's are the same alone."""
    numbers, weights = random_numbers(seed, num_rows, LINE * lines), random_numbers(seed + 1, outputs, LINE * lines)
    rows, matrix = rows_of(numbers), matrix_of(weights)
    row_values, weight_values = row_numbers(rows, num_rows), matrix_numbers(matrix, outputs)
    row_step = numbers.abs().max().item() / MOST_SIGNED
    for values, right, step in (
        (row_values, numbers, row_step),
        (weight_values, weights, weights.abs().max().item() / MOST),
    ):
        assert np.abs(values - right.numpy()).max() <= step / 2 * 1.001
    width = len(matrix) * LANES
    bias, right = random_numbers(seed + 2, width).numpy(), row_values @ weight_values.T

    def product(rows: np.ndarray, num_rows: int) -> np.ndarray:
        out = np.full((num_blocks(num_rows) * LANES, width), np.nan, np.float32)
        project(counters(2)[0], 2, rows, num_rows, matrix, bias, out)
        return out[:num_rows, :outputs]

    together = product(rows, num_rows)
    np.testing.assert_allclose(together, right + bias[:outputs], rtol=1e-5, atol=1e-4)
    for row in {0, num_rows // 2, num_rows - 1}:
        assert (product(rows_of(numbers[row : row + 1]), 1)[0] == together[row]).all()
    lanes = np.ones((len(rows), width, LANES), np.float32)
    project(counters(2)[0], 2, rows, num_rows, matrix, None, lanes)
    sums = lanes.transpose(0, 2, 1).reshape(-1, width)[:num_rows, :outputs]
    np.testing.assert_allclose(sums, 1 + right, rtol=1e-5, atol=1e-4)


@given(seed=st.integers(0, 1000), values=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=4))
def test_the_largest_possible_sums_are_exact(seed: int, values: list[float]) -> None:
    """All weights are the largest, with the signs of a row's numbers: sums of two in 16 bits hardly fit."""
    rng = np.random.default_rng(seed)
    numbers = torch.from_numpy(rng.choice(np.float32(values), (LANES, 2 * LINE)))
    signs = torch.where(numbers < 0, -1.0, 1.0)
    rows, matrix = rows_of(numbers), matrix_of(signs)
    out = np.zeros((LANES, LANES), np.float32)
    project(counters(2)[0], 2, rows, LANES, matrix, np.zeros(LANES, np.float32), out)
    right = row_numbers(rows, LANES) @ matrix_numbers(matrix, LANES).T
    np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-4)


def test_all_zero_numbers_are_handled() -> None:
    rows, matrix = rows_of(torch.zeros(3, LINE)), matrix_of(torch.zeros(5, LINE))
    assert (row_numbers(rows, 3) == 0).all()
    assert (matrix_numbers(matrix, 5) == 0).all()


def test_products_on_processors_without_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm_vectors, "has_feature", lambda _name: False)
    tile = gemm_int8.tile_of(8)

    @numba.njit
    def run(rows, matrix, bias, out):
        tile(rows, 8, matrix, 0, bias, out)

    rows, matrix = rows_of(random_numbers(0, LANES, 2 * LINE)), matrix_of(random_numbers(1, LANES, 2 * LINE))
    out = np.zeros((LANES, LANES), np.float32)
    run(rows, matrix, np.zeros(LANES, np.float32), out)
    right = row_numbers(rows, LANES)[8:] @ matrix_numbers(matrix, LANES).T
    np.testing.assert_allclose(out[8:], right, rtol=1e-5, atol=1e-4)


@pytest.fixture(params=["llama", "qwen2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model whose sizes allow 8 bits."""
    config = {**FAMILIES[request.param].to_dict(), "intermediate_size": 2 * LINE}
    monkeypatch.setitem(FAMILIES, request.param, type(FAMILIES[request.param])(**config))
    return perturbed(tmp_path, request.param)


def loaded(folder: Path, bits: str, dtype: str = "bfloat16") -> ResidentModel:
    return load_draft(Checkpoint.open(folder), (), dtype, CPU, bits=bits)


def test_a_model_in_8_bits_is_close_to_itself_in_16(folder: Path) -> None:
    """A random model's logits are wide apart: those of another one would differ by more than their size."""
    whole, in_8 = in_tree(loaded(folder, "16")), in_tree(loaded(folder, "8"))
    assert (in_8 - whole).abs().mean() < 0.3 * whole.abs().mean()


def in_tree(model: ResidentModel, *others: int) -> torch.Tensor:
    """Logits of the tree after the context, with contexts of this many tokens in the same batch."""
    shape = model.skeleton.kv_shape()
    slot = KVSlot(shape, 120, CPU)
    model.logits(Batch([Segment.context(slot, 0, CONTEXT)], None, CPU))
    beside = [Segment.context(KVSlot(shape, 120, CPU), 0, CONTEXT[:length]) for length in others]
    return model.logits(Batch([*beside, Segment.tree(slot, len(CONTEXT), TREE)], None, CPU)).clone()


def test_other_rows_do_not_change_a_row_in_8_bits(folder: Path) -> None:
    model = loaded(folder, "8")
    alone = in_tree(model)
    for others in ((1,), (9,), (33, 20)):
        assert torch.equal(in_tree(model, *others), alone)


def test_vocabularies_that_do_not_fill_a_group_are_handled(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=99
    )
    model = loaded(save_model(tmp_path, config), "8")
    slot = KVSlot(model.skeleton.kv_shape(), 4, CPU)
    logits = model.logits(Batch([Segment.tree(slot, 0, Tree.root(98))], None, CPU))
    assert logits.shape == (1, 99)
    assert logits.isfinite().all()


@pytest.mark.parametrize("has_instruction", [True, False])
def test_8_bits_are_used_if_possible(
    has_instruction: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bough.model.backends.cpu.multiplies_bytes", lambda: has_instruction)
    assert ("8 bits" in loaded(folder, "auto").describe()) == has_instruction
    assert "8 bits" in loaded(folder, "8").describe()
    assert "8 bits" not in loaded(folder, "16").describe()
    other, narrow = save_model(tmp_path / "other", GemmaConfig(**GEMMA)), save_model(tmp_path / "narrow", TINY)
    for model, dtype in ((other, "bfloat16"), (narrow, "bfloat16"), (folder, "float32")):
        with pytest.raises(ConfigError, match=r"--bits: must be 16 or auto for .* got 8"):
            loaded(model, "8", dtype)
        assert "8 bits" not in loaded(model, "auto", dtype).describe()
