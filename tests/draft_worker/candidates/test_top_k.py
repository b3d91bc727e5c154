"""The largest logits of a row, compared with sorting, and the noise of single tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.model.sampling.sampler import gumbel_noise
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree_plan import Guess
from draft_worker.candidates.candidates import Guessing
from draft_worker.candidates.noise import noise_at
from draft_worker.model.model_draft import GROUP, largest

ENOUGH = 256 * GROUP
SIZES = [300, ENOUGH, ENOUGH + 37]  # left to torch; in whole groups; with a rest that is in no group


def sorted_best(row: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """The lower token first where logits are equal."""
    best = np.argsort(-row, kind="stable")[:num]
    return row[best], best


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num", [1, 64, 256])
def test_candidates_are_those_of_sorting(vocab_size: int, num: int) -> None:
    """Also of rows that are apart in memory, as a model leaves them, and with banned tokens among them."""
    rng = np.random.default_rng(vocab_size + num)
    room = torch.from_numpy(rng.normal(size=(5, vocab_size + 11)).astype(np.float32))
    room[1] *= 1e30
    room[2, rng.choice(vocab_size, vocab_size // 2, replace=False)] = -torch.inf
    room[3, vocab_size - 1], room[4, 0] = 50.0, 50.0
    logits = room[:, :vocab_size]
    values, tokens = largest(logits, num)
    assert (values.dtype, tokens.dtype) == (np.float32, np.int32)
    for row in range(5):
        wanted, best = sorted_best(logits[row].numpy(), num)
        np.testing.assert_array_equal(values[row], wanted)
        assert tokens[row][np.isfinite(wanted)].tolist() == best[np.isfinite(wanted)].tolist()


@pytest.mark.parametrize("same", [0.0, -np.inf])
def test_rows_with_many_equal_values(same: float) -> None:
    """Other rows are not affected."""
    logits = torch.full((3, 3 * ENOUGH), same)
    logits[1, 7] = 3.0
    logits[2] = torch.from_numpy(np.random.default_rng(1).integers(-500, 500, 3 * ENOUGH).astype(np.float32))
    values, tokens = largest(logits, 256)
    assert (values[0] == same).all()
    assert (values[1, 0], tokens[1, 0], set(values[1, 1:])) == (3.0, 7, {same})
    assert all(len(set(row)) == 256 for row in tokens.tolist())
    assert tokens[2].tolist() == sorted_best(logits[2].numpy(), 256)[1].tolist()


def test_a_row_of_nans_is_reported_and_affects_no_other() -> None:
    logits = torch.full((2, ENOUGH), torch.nan)
    logits[1] = torch.randn(ENOUGH, generator=torch.Generator().manual_seed(1))
    values, _ = largest(logits, 64)
    assert np.isnan(values[0]).all()
    np.testing.assert_array_equal(values[1], sorted_best(logits[1].numpy(), 64)[0])


def test_finite_logits_among_many_nans_are_found() -> None:
    """A head whose last rows are no numbers, as padding of a vocabulary may be, has NaN in every group."""
    logits = torch.randn(2, ENOUGH, generator=torch.Generator().manual_seed(0))
    logits[0, ENOUGH // 64 :] = torch.nan
    values, _ = largest(logits, 256)
    known = np.sort(logits[0, : ENOUGH // 64].numpy())[::-1]
    assert np.array_equal(values[0, : min(256, len(known))], known[:256])
    assert (values[0, len(known) :] == -np.inf).all()
    assert np.array_equal(values[1], logits[1].topk(256).values.numpy())


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
    st.lists(st.integers(0, 999), min_size=1, max_size=20),
)
def test_noise_of_single_tokens_equals_the_rows(seed: int, positions: list[int], tokens: list[int]) -> None:
    rows = np.array([gumbel_noise(seed, position, 1000)[tokens] for position in positions])
    own = noise_at(seed, np.array(positions, np.int32), np.tile(np.array(tokens, np.int32), (len(positions), 1)))
    assert own.tobytes() == rows.tobytes()


@pytest.mark.parametrize("guess", Guess)
def test_noise_is_only_computed_for_considered_tokens(guess: Guess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for whole vocabularies, kept from step to step, came to 131 MB at 128,000 tokens, in no budget."""

    def refuse(*_: object) -> None:
        raise AssertionError("noise for a whole vocabulary")

    monkeypatch.setattr("bough.model.sampling.sampler._raw", refuse)
    guessing = Guessing(SamplingParams(seed=5), 0, is_sample=False, is_perturbed=guess is Guess.SAMPLE)
    tokens = np.arange(12, dtype=np.int32).reshape(3, 4) + 128_000
    values = np.zeros((3, 4), np.float32)
    found = guessing.candidates(values, tokens, np.array([3, 4, 4], np.int32))
    if guess is Guess.SAMPLE:
        noise = noise_at(5, np.array([3, 4, 4], np.int32), tokens)
        assert found.tokens.tolist() == np.take_along_axis(tokens, np.argsort(-noise, axis=1), 1).tolist()
    else:
        assert found.tokens.tolist() == tokens.tolist()
