"""The noise of single tokens is that of whole rows, bit for bit: a draft must see what the target will draw by."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.model.sampling.sampler import gumbel_noise
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree_plan import Guess
from draft_worker.candidates.candidates import Guessing
from draft_worker.candidates.noise import noise_at


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
    st.lists(st.integers(0, 999), min_size=1, max_size=20),
)
def test_noise_of_single_tokens_is_that_of_the_row(seed: int, positions: list[int], tokens: list[int]) -> None:
    rows = np.array([gumbel_noise(seed, position, 1000)[tokens] for position in positions])
    own = noise_at(seed, np.array(positions, np.int32), np.tile(np.array(tokens, np.int32), (len(positions), 1)))
    assert own.tobytes() == rows.tobytes()


@pytest.mark.parametrize("guess", Guess)
def test_guessing_makes_noise_for_no_token_but_those_considered(guess: Guess, monkeypatch: pytest.MonkeyPatch) -> None:
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
