"""Penalties and bias on a draft's logits: the bits of whole rows, and except for rounding the target's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.model.sampling.sampler import TokenCounts
from bough.protocol.sampling_params import BANNED, SamplingParams
from draft_worker.candidates.candidates import Guessing
from draft_worker.model.model_draft import adjust
from tests.fakes.draft import VOCAB, FakeModel, grow_call, grown_alone, new_engine, started

NUM_TOKENS = 12
PENALTIES = SamplingParams(0.0, repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.4)


def whole_rows(
    logits: np.ndarray, params: SamplingParams, texts: list[list[int]], prompt_length: int, vocab_size: int
) -> np.ndarray:
    """(num_nodes, vocab_size) float32: each penalty on every token of the vocabulary, a text for each node."""
    rows, size = logits.copy(), logits.shape[1]
    if params.has_penalties:
        is_seen = np.array([[token in text for token in range(size)] for text in texts])
        counts = np.array([[text[prompt_length:].count(token) for token in range(size)] for text in texts])
        exact = rows.astype(np.float64)  # as at the target, and rounded once
        exact = np.where(exact > 0, exact / params.repetition_penalty, exact * params.repetition_penalty)
        exact -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        rows = np.where(is_seen, exact, rows).astype(np.float32)
    for token, bias in params.logit_bias.items():
        rows[:, token : token + 1] += bias
    for row, text in zip(rows, texts, strict=True):
        if len(text) - prompt_length < params.min_tokens:
            row[[token for token in params.stop_token_ids if token < size]] = -np.inf
    if vocab_size:
        rows[:, vocab_size:] = -np.inf
    return rows


def upon(logits: np.ndarray, guessing: Guessing, held: list[int], paths: list[list[int]], width: int = 0) -> np.ndarray:
    """What a draft makes of the logits of nodes, given the tokens from the root to each."""
    width = max(width, *map(len, paths))
    tokens = np.array([[*path, *[0] * (width - len(path))] for path in paths], np.int32)
    places = [[*range(len(held), len(held) + len(path)), *[-1] * (width - len(path))] for path in paths]
    rows = torch.from_numpy(logits.copy())
    adjust(rows, guessing, TokenCounts.of(held, guessing.prompt_length), tokens, np.array(places, np.int32))
    return rows.numpy()


token = st.integers(0, NUM_TOKENS + 2)  # some are the target's alone
penalties = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7, 100.0]),
    presence_penalty=st.sampled_from([0.0, 0.6, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.37, -1.1]),
    logit_bias=st.dictionaries(token, st.sampled_from([1.5, -0.1, BANNED]), max_size=4),
    stop_token_ids=st.frozensets(token, max_size=3),
    min_tokens=st.sampled_from([0, 0, 1, 3, 20]),
)


@given(
    penalties,
    st.lists(token, max_size=30),
    st.lists(st.lists(token, min_size=1, max_size=5), min_size=1, max_size=5),
    st.integers(0, 40),
    st.sampled_from([0, NUM_TOKENS - 3, NUM_TOKENS + 3]),
    st.integers(0, 99),
)
def test_penalties_change_candidates_like_whole_rows(
    params: SamplingParams, held: list[int], paths: list[list[int]], prompt_length: int, vocab_size: int, seed: int
) -> None:
    """Bit for bit, for any end of the prompt and any repetition, with logits of -inf and 0 among them."""
    rng = np.random.default_rng(seed)
    logits = (4 * rng.normal(size=(len(paths), NUM_TOKENS))).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[rng.random(logits.shape) < 0.1] = 0.0
    guessing = Guessing(params, prompt_length, is_sample=False, is_perturbed=False, vocab_size=vocab_size)
    texts = [[*held, *path] for path in paths]
    expected = whole_rows(logits, params, texts, prompt_length, vocab_size)
    assert np.array_equal(upon(logits, guessing, held, paths, width=6), expected)


def test_penalties_are_only_computed_for_seen_tokens() -> None:
    """A row has 49,152 logits, and a path a few tokens: steps with penalties once took longer than the model did."""
    params = replace(PENALTIES, logit_bias={7: 1.0})
    logits = np.full((2, 1000), np.nan, np.float32)
    logits[:, [3, 4, 5, 7]] = 1.0
    found = upon(logits, Guessing(params, 1, is_sample=False, is_perturbed=False), [3, 3, 4], [[5], [5, 4]])
    changed = np.flatnonzero((found != logits).any(0) & ~np.isnan(found).all(0))
    assert changed.tolist() == [3, 4, 5, 7]
    assert np.isnan(found).sum() == 2 * 996


def test_penalties_change_tensors_in_inference_mode() -> None:
    """A model's are, and torch refuses to change them outside of it."""
    with torch.inference_mode():
        rows = torch.ones(1, NUM_TOKENS)
    guessing = Guessing(replace(PENALTIES, logit_bias={1: 1.0}), 0, is_sample=False, is_perturbed=False, vocab_size=9)
    adjust(rows, guessing, TokenCounts.of([], 0), np.array([[3]], np.int32), np.array([[0]], np.int32))
    assert rows[0, [1, 2, 9]].tolist() == [2.0, 1.0, -np.inf]
    assert rows[0, 3] == pytest.approx(1 / 1.7 - 1.0)


def test_counts_begin_after_the_prompt() -> None:
    past = TokenCounts.of([5, 2, 5, 5, 9], prompt_length=2)
    assert (past.tokens.tolist(), past.num_outputs.tolist()) == ([2, 5, 9], [0, 2, 1])
    assert TokenCounts.of([5, 2], prompt_length=7).num_outputs.tolist() == [0, 0]
    assert len(TokenCounts.of((), 0).tokens) == 0


def test_sessions_do_not_share_penalties() -> None:
    """They share a step, and so one tensor of logits."""
    engine, asked = new_engine(FakeModel()), []
    banned = SamplingParams(0.0, logit_bias=dict.fromkeys(range(1, VOCAB), BANNED))
    for number, params in enumerate((SamplingParams(0.0), PENALTIES, banned, SamplingParams(0.0))):
        call = grow_call([3, 1, 4, 1, 2], sampling=params, session_id=str(number))
        asked.append((call, started(engine, call)))
    while engine.is_growing:
        engine.step()
    for call, future in asked:
        assert future.result(0).tree == grown_alone(call).tree
    assert {*asked[2][1].result(0).tree.tokens.tolist()[1:]} == {0}
