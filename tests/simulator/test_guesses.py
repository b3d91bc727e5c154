"""What the trees of simulated drafts bring, against exact shapes and against trees grown one by one."""

from __future__ import annotations

import heapq
from random import Random

import numpy as np
import pytest

from bough.simulation.acceptance_model import LLAMA_3_CNN, AcceptanceModel
from bough.simulation.text_model import FIRST_WORD, NUM_WORDS, TextModel
from bough.trees.tree_plan import BestFirst
from simulator.guesses import PooledText, expected_tokens
from tests.fakes.simulated import expected_tokens_of, true_ranks


def tokens_of(model: AcceptanceModel, nodes: int, depth: int) -> float:
    """Of trees whose steps are wide enough to expand everything that is worth it."""
    return expected_tokens(TextModel(model, FIRST_WORD, NUM_WORDS), BestFirst(nodes, nodes, depth))


def grown_one_by_one(model: AcceptanceModel, nodes: int, depth: int, num_rounds: int) -> list[int]:
    """Tokens of rounds whose trees grow best first by what the draft states, and are walked by the truth."""
    guesses = TextModel(model, FIRST_WORD, NUM_WORDS)
    tokens = []
    for seed in range(num_rounds):
        heap = [(-1.0, 0, 0, True)]
        found, taken, true_nodes = 1, 0, 0
        right = true_ranks(guesses, seed, np.arange(1, depth + 1))
        while heap and taken < nodes:
            value, name, at, is_true = heapq.heappop(heap)
            taken += 1
            true_nodes += is_true
            if at < depth:
                here, position = np.array([is_true]), np.array([at + 1])
                probs = np.exp(guesses.candidates(seed, here, position, np.array([name])).log_probs[0].astype(float))
                for rank, prob in enumerate(probs):
                    heapq.heappush(heap, (value * prob, found, at + 1, bool(is_true and rank == right[at])))
                    found += 1
        tokens.append(true_nodes)
    return tokens


@pytest.mark.parametrize(("nodes", "depth"), [(2, 1), (4, 3), (8, 8), (64, 4), (64, 40), (768, 17)])
def test_if_positions_are_equal_the_result_is_the_best_shapes(nodes: int, depth: int) -> None:
    model = AcceptanceModel("by_rank", (LLAMA_3_CNN,))
    exact = expected_tokens_of(model, nodes, depth + 1)
    assert tokens_of(model, nodes, depth) == pytest.approx(exact, rel=1e-4)


def test_acceptance_by_depth_is_followed() -> None:
    model = AcceptanceModel("by_depth", ((0.9, 0.05), (0.5, 0.2), (0.1, 0.1)))
    for nodes, depth in ((3, 2), (6, 3), (12, 5)):
        exact = expected_tokens_of(model, nodes, depth + 1)
        assert tokens_of(model, nodes, depth) == pytest.approx(exact, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "depth"), [(4, 3), (16, 8), (48, 4)])
def test_if_positions_differ_the_result_is_the_mean_of_grown_trees(nodes: int, depth: int) -> None:
    """Within 3 % and four standard errors of trees of exactly this many nodes: the prediction uses their mean."""
    model = AcceptanceModel("by_rank", (LLAMA_3_CNN[:8],), spread=0.6)
    tokens = grown_one_by_one(model, nodes, depth, 300)
    error = 4 * float(np.std(tokens)) / np.sqrt(len(tokens))
    assert abs(tokens_of(model, nodes, depth) - np.mean(tokens)) < 0.03 * np.mean(tokens) + error


def test_more_nodes_and_levels_never_reduce_tokens_and_variation_helps() -> None:
    models = [AcceptanceModel("by_rank", (LLAMA_3_CNN,), spread=spread) for spread in (0.0, 0.7)]
    plain, spread = (
        [[tokens_of(model, n, depth) for depth in (1, 4, 16)] for n in (2, 8, 64, 512)] for model in models
    )
    for table in (np.array(plain), np.array(spread)):
        assert (np.diff(table, axis=0) >= -0.02 * table[1:]).all()  # trees of a size are a sample of their own
        assert (np.diff(table, axis=1)[1:] >= -0.02 * table[1:, 1:]).all()
    assert spread[2][2] > plain[2][2]


def test_a_hostile_draft_gains_nothing() -> None:
    assert tokens_of(AcceptanceModel("hostile", ((0.0,) * 16,)), 512, 16) == 1.0


def test_drawn_tokens_agree_with_expected_ones() -> None:
    """Of 2,000 rounds, to four standard errors."""
    model, growth = (
        TextModel(AcceptanceModel("by_rank", (LLAMA_3_CNN,), spread=0.5), FIRST_WORD, NUM_WORDS),
        BestFirst(64, 16, 8),
    )
    text, tokens = PooledText(model, Random(1)), []
    for _ in range(2000):
        grown = text.grow(100, growth)
        tokens.append(len(text.verdict(100, grown.tree).accepted_nodes) + 1)
    error = 4 * float(np.std(tokens)) / np.sqrt(len(tokens))
    assert abs(float(np.mean(tokens)) - expected_tokens(model, growth)) < error + 0.02 * float(np.mean(tokens))
