"""The GPU's kernels of norms, rotary embeddings and gates, interpreted: near torch's, and a row's bits are its own."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from bough.model.backend import ACTIVATIONS, Norm, load
from bough.model.running.fused_parts import NORMS, ROTARIES
from tests.fakes.tiers import long_but

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytest.importorskip("triton", reason="Triton is not installed; builds of torch for GPUs bring it")
if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("without a GPU, TRITON_INTERPRET=1 has the kernel interpreted", allow_module_level=True)

from bough.model.gpu import rows_triton  # noqa: E402  # imports Triton

BY_TORCH = load("reference")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTH = 96  # fills no tile
MOST_UNEQUAL = 0.02  # share of numbers in 16 bits: sums in another order seldom round to another number


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def require_near(mine: torch.Tensor, theirs: torch.Tensor, num_roundings: int = 1) -> None:
    """Equal but for neighbouring numbers of their type; in float32 sums may differ by more."""
    assert mine.dtype == theirs.dtype
    step = torch.finfo(mine.dtype).eps
    if mine.dtype == torch.float32:
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)
    else:
        torch.testing.assert_close(mine, theirs, atol=0, rtol=num_roundings * step)
        assert (mine != theirs).float().mean() <= MOST_UNEQUAL


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS, ids=str)
def test_norms_are_torchs_within_one_rounding(kind: Norm, dtype: torch.dtype) -> None:
    """Of rows, of heads that have weights of their own, and of a part of wider rows, with and without a gate."""
    wider = random(1, 6, WIDTH + 32, dtype=dtype)
    for rows, weight in (
        (3 * random(2, 5, WIDTH, dtype=dtype), random(WIDTH, dtype=dtype, seed=1)),
        (1e-3 * random(1, 5, 4, 16, dtype=dtype), random(4, 16, dtype=dtype, seed=1)),
        (wider[:, :, 32:], random(WIDTH, dtype=torch.float32, seed=1)),
        (wider[:, :, 3 : WIDTH + 3], random(WIDTH, dtype=dtype, seed=1)),
    ):
        for gate in (None, random(*rows.shape, dtype=dtype, seed=2)):
            mine, theirs = (of.norm(rows, weight, 1e-5, kind, gate) for of in (rows_triton, BY_TORCH))  # type: ignore[attr-defined]
            require_near(mine, theirs, 1 + kind.is_rounded + (gate is not None))


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_but(NORMS[:1], NORMS), ids=str)
def test_a_rows_norm_has_the_same_bits_among_any_others(kind: Norm) -> None:
    """Also where rows are parts of wider ones, and begin at any address."""
    row, weight = random(WIDTH, dtype=torch.bfloat16), random(WIDTH, dtype=torch.bfloat16, seed=1)
    wanted = rows_triton.norm(row[None], weight, 1e-6, kind)[0]
    for num_rows, wider in ((1, 0), (8, 7), (8, 32), (64, 0), (256, 0)):
        rows = random(num_rows, WIDTH + wider, dtype=torch.bfloat16, seed=2)[:, wider:]
        places = [0, num_rows // 3, num_rows - 1]
        rows[places] = row
        assert all(torch.equal(found, wanted) for found in rows_triton.norm(rows, weight, 1e-6, kind)[places])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ROTARIES, ids=str)
def test_rotations_have_torchs_bits(kind: Any, dtype: torch.dtype) -> None:
    """Of heads in the layout of a projection or in their own, wholly or in part turned, by tables in either type."""
    heads, keys = random(1, 3, 7, 24, dtype=dtype).transpose(1, 2), random(1, 2, 3, 24, dtype=dtype, seed=1)
    for width in (24, 12):
        for table_dtype in {dtype, torch.float32}:
            cos, sin = (random(1, 3, width, dtype=table_dtype, seed=seed) for seed in (2, 3))
            if kind.table.name == "HALF":
                cos, sin = cos[..., : width // 2], sin[..., : width // 2]
            mine, theirs = (of.rotate(heads, keys, cos, sin, kind) for of in (rows_triton, BY_TORCH))  # type: ignore[attr-defined]
            for ours, wanted in zip(mine, theirs, strict=True):
                assert ours.dtype == wanted.dtype
                assert torch.equal(ours, wanted)
            assert mine[0].transpose(1, 2).is_contiguous(), "attention needs no copy"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_are_torchs_within_a_rounding(activation: str, dtype: torch.dtype) -> None:
    """Exponentials differ in the last bit of float32; torch's GELU loses more where 1 + tanh is nearly 0."""
    both = random(1, 3, 2 * rows_triton.TILE_NUMBERS + 14, dtype=dtype)
    gates, ups = (3 * both).clamp(-8, 8).chunk(2, -1)
    mine, theirs = (of.gate(gates, ups, activation) for of in (rows_triton, BY_TORCH))  # type: ignore[attr-defined]
    lost = 0.0 if activation == "silu" else 8 * 8 * 2**-22
    torch.testing.assert_close(mine, theirs, atol=lost + 1e-6, rtol=2 * torch.finfo(dtype).eps)
    assert torch.equal(rows_triton.gate(gates[:, 1:2], ups[:, 1:2], activation), mine[:, 1:2]), "of one row"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_experts_outputs_are_added_in_their_order(k: int, dtype: torch.dtype) -> None:
    """Times weights of either type, each step rounded. What no expert has made counts nothing."""
    num_rows, num_experts, width = 5, 9, 1100
    orders = [torch.randperm(num_experts + 1, generator=torch.Generator().manual_seed(i))[:k] for i in range(num_rows)]
    chosen = torch.stack(orders).to(DEVICE)  # 9 is no expert
    tiles = BY_TORCH.expert_tiles(chosen, num_experts)
    made = random(num_rows * k, width, dtype=dtype)
    made[tiles.entries[chosen.flatten() == num_experts]] = torch.nan
    for of in (torch.float32, dtype):
        weights = random(num_rows, k, dtype=of, seed=1)
        found = rows_triton.combine(made, tiles, chosen, weights, num_experts)
        wanted = torch.zeros_like(found)
        for row in range(num_rows):
            for expert, rank in sorted(zip(chosen[row].tolist(), range(k), strict=True)):
                if expert < num_experts:
                    wanted[row] += (made[tiles.entries[row * k + rank]] * weights[row, rank]).to(dtype)
        assert torch.equal(found, wanted)
        assert torch.equal(BY_TORCH.combine(made, tiles, chosen, weights, num_experts), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    """A GPU's own NaN has all bits of its mantissa set: rounded as a number in bfloat16 it would be -0."""
    rows, weight = random(2, 16, dtype=dtype), torch.ones(16, device=DEVICE)
    rows[0, 3] = torch.nan
    for kind in NORMS:
        assert rows_triton.norm(rows, weight, 1e-6, kind).isnan().sum(1).tolist() == [16, 0]
        weight.view(torch.int32)[5] = 0x7FFFFFFF
        assert rows_triton.norm(rows, weight, 1e-6, kind).isnan().sum(1).tolist() == [16, 1]
        weight[5] = 1.0
    far = torch.tensor([[torch.inf, -50.0, 50.0]], dtype=dtype, device=DEVICE)
    for activation in ACTIVATIONS:
        gated = rows_triton.gate(rows, torch.ones_like(rows), activation)
        assert gated.isnan().nonzero().tolist() == [[0, 3]]
        with np.errstate(over="ignore"):
            ends = rows_triton.gate(far, torch.ones_like(far), activation)
        assert ends[0].abs().tolist() == pytest.approx([torch.inf, 0.0, 50.0], abs=1e-15)
    heads = rows.view(1, 1, 2, 16)
    turned, _ = rows_triton.rotate(heads, heads, *torch.ones(2, 1, 2, 16, dtype=dtype, device=DEVICE), ROTARIES[0])
    assert turned.isnan().nonzero()[:, 2:].tolist() == [[0, 3], [0, 11]], "of a pair"
