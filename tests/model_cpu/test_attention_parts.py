"""Scores, weights and values of attention by themselves: right, and the same bits beside whatever else."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.model.cpu.attention_scores import KEYS_AHEAD, ROWS, WIDTH, put_scores, rows_of, whole
from bough.model.cpu.attention_tiles import lanes_of, weigh_scores, weigh_values
from bough.model.cpu.gemm import GROUP
from bough.model.cpu.linear import numbers
from bough.model.cpu.llvm_vectors import LANES
from tests.model_cpu.test_project import before_a_wall, random_numbers, words_of

KINDS = pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])


@numba.njit
def _asked(queries, begin, end, kv_head, group, num_words, width):  # type: ignore[no-untyped-def]
    return rows_of(queries, begin, end, kv_head, group, num_words, width)


def scores_of(queries: torch.Tensor, keys: np.ndarray, kept: list[int]) -> np.ndarray:
    """(rows, kept keys) of queries (rows, dimensions) with keys (keys, dimensions)."""
    num_rows, lanes, size = len(queries), lanes_of(len(queries)), whole(len(kept), GROUP)
    words = words_of(queries)
    asked = _asked(words, 0, num_rows, 0, 1, words.shape[1], keys.shape[1])
    scores = np.full((whole(num_rows, lanes) // lanes, size, lanes), np.nan, np.float32)
    put_scores(asked, keys, np.array(kept + [kept[-1]] * (size - len(kept) + KEYS_AHEAD), np.int64), scores)
    return scores.transpose(0, 2, 1).reshape(-1, size)[:num_rows, : len(kept)]


@KINDS
@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(1, 3 * LANES),
    num_keys=st.integers(1, 50),
    width=st.sampled_from([WIDTH, 2 * WIDTH, 5 * WIDTH]),
)
def test_a_score_knows_of_no_other(kind: torch.dtype, seed: int, num_rows: int, num_keys: int, width: int) -> None:
    """Neither of other rows, nor of other keys, nor of their order."""
    rng = np.random.default_rng(seed)
    queries, keys = random_numbers(seed, num_rows, width).to(kind), random_numbers(seed + 1, 60, 3, width).to(kind)
    own, kept = numbers(keys)[:, 1], rng.permutation(60)[:num_keys].tolist()
    scores = scores_of(queries, own, kept)
    right = queries.double() @ keys[kept, 1].double().T
    np.testing.assert_allclose(scores, right.numpy(), rtol=1e-4, atol=1e-3)
    row, key = rng.integers(num_rows), rng.integers(num_keys)
    assert scores_of(queries[row : row + 1], own, [kept[key]])[0, 0] == scores[row, key]


@KINDS
def test_nothing_is_read_beyond_keys_and_values(kind: torch.dtype) -> None:
    """The last number of the last one stands before memory that nobody may read."""
    rows = random_numbers(1, 21, WIDTH).to(kind)
    guarded = before_a_wall(numbers(rows).tobytes()).view(numbers(rows).dtype).reshape(21, WIDTH)
    queries, every = random_numbers(2, 3, WIDTH).to(kind), list(range(21))
    assert (scores_of(queries, guarded, every) == scores_of(queries, numbers(rows), every)).all()
    weights = random_numbers(3, 3, 21).float()
    for num_first in (0, 21):
        assert (weighed(weights, guarded, every, num_first) == weighed(weights, numbers(rows), every, num_first)).all()


def weighed(weights: torch.Tensor, values: np.ndarray, kept: list[int], num_first: int) -> np.ndarray:
    """weights (rows, kept keys) times values (keys, dimensions)."""
    num_rows, lanes = len(weights), lanes_of(len(weights))
    blocks = np.zeros((whole(num_rows, lanes) // lanes, len(kept), lanes), np.float32)
    for row in range(num_rows):
        blocks[row // lanes, :, row % lanes] = weights[row]
    out = np.full((len(blocks) * lanes, values.shape[1]), np.nan, np.float32)
    weigh_values(blocks, values, np.array(kept, np.int64), num_first, len(kept), num_rows, out)
    return out[:num_rows]


@KINDS
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 9, 13, 24])
def test_weights_times_values(num_rows: int, kind: torch.dtype) -> None:
    """Right, and the same bits of few rows and many, where values are neighbours or not."""
    weights, values = random_numbers(1, num_rows, 25).float(), random_numbers(2, 40, 3, 2 * WIDTH).to(kind)
    own, kept = numbers(values)[:, 1], [*range(7, 27), 3, 39, 2, 30, 1]
    whole_, right = weighed(weights, own, kept, 20), weights.double() @ values[kept, 1].double()
    np.testing.assert_allclose(whole_, right.numpy(), rtol=1e-4, atol=1e-3)
    for num_first in (0, 1, 20):
        assert (weighed(weights, own, kept, num_first) == whole_).all()
    for row in range(num_rows):
        assert (weighed(weights[row : row + 1], own, kept, 20) == whole_[row]).all()
    hidden = torch.cat([weights[:, :5], torch.zeros(num_rows, 3), weights[:, 5:]], 1)
    assert (weighed(hidden, own, [*kept[:5], 35, 36, 37, *kept[5:]], 5) == whole_).all()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sink", [-np.inf, 1.5])
def test_weights_of_scores(sink: float, softcap: float) -> None:
    """Right, and the same bits however many lanes a key has."""
    few = np.random.default_rng(1).normal(size=(3 * GROUP, ROWS)).astype(np.float32)
    few[5:9, 1], few[-4:] = -np.inf, -np.inf
    found = []
    for lanes in {ROWS, 8, LANES}:
        scores = np.zeros((len(few), lanes), np.float32)
        scores[:, :ROWS] = few
        totals = np.full(lanes, np.nan, np.float32)
        weigh_scores(scores, np.float32(0.5), np.float32(softcap), np.full(LANES, sink, np.float32), totals)
        found.append((scores[:, :ROWS], totals[:ROWS]))
    assert all((weights == found[0][0]).all() and (totals == found[0][1]).all() for weights, totals in found)
    seen = few.astype(np.float64) / 2
    seen = np.where(np.isfinite(seen), softcap * np.tanh(seen / softcap), seen) if softcap else seen
    every = np.vstack([seen, np.full(ROWS, sink)])
    right = np.exp(every - every.max(0))
    np.testing.assert_allclose(found[0][0], right[:-1], rtol=1e-5)
    np.testing.assert_allclose(found[0][1], right.sum(0), rtol=1e-5)
