"""What rounds bring by size, against exact shapes and against trees grown one by one; and which size is chosen."""

from __future__ import annotations

import heapq
import json

import numpy as np
import pytest

from bough.simulation.acceptance_law import LLAMA_3_CNN, AcceptanceLaw
from bough.simulation.capacity_choice import PLAIN, RoundLoad, Size, SizeChoice
from bough.simulation.law import Law
from bough.simulation.profile import Profile, parse_profile
from bough.simulation.round_yield import RoundYield
from bough.simulation.tokenizer import FIRST_WORD, NUM_WORDS
from tests.fakes.simulated import expected_tokens_of, true_ranks


def grown_one_by_one(law: AcceptanceLaw, nodes: int, depth: int, num_rounds: int) -> list[int]:
    """Tokens of rounds whose trees grow best first by what the draft states, and are walked by the truth."""
    guesses = Law(law, FIRST_WORD, NUM_WORDS)
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
def test_where_positions_are_alike_it_is_the_best_shape(nodes: int, depth: int) -> None:
    law = AcceptanceLaw("by_rank", (LLAMA_3_CNN,))
    exact = expected_tokens_of(law, nodes, depth + 1)
    assert RoundYield(law).expected_tokens(nodes, depth) == pytest.approx(exact, rel=1e-4)


def test_laws_by_depth_are_followed_down() -> None:
    law = AcceptanceLaw("by_depth", ((0.9, 0.05), (0.5, 0.2), (0.1, 0.1)))
    for nodes, depth in ((3, 2), (6, 3), (12, 5)):
        exact = expected_tokens_of(law, nodes, depth + 1)
        assert RoundYield(law).expected_tokens(nodes, depth) == pytest.approx(exact, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "depth"), [(4, 3), (16, 8), (48, 4)])
def test_where_positions_differ_it_is_what_trees_come_to(nodes: int, depth: int) -> None:
    """Within 3 % and four standard errors of trees of exactly so many nodes: the reckoning takes them as a mean."""
    law = AcceptanceLaw("by_rank", (LLAMA_3_CNN[:8],), spread=0.6)
    tokens = grown_one_by_one(law, nodes, depth, 300)
    error = 4 * float(np.std(tokens)) / np.sqrt(len(tokens))
    assert abs(RoundYield(law).expected_tokens(nodes, depth) - np.mean(tokens)) < 0.03 * np.mean(tokens) + error


def test_more_nodes_and_levels_never_bring_less_and_differences_help() -> None:
    plain, spread = (RoundYield(AcceptanceLaw("by_rank", (LLAMA_3_CNN,), spread=spread)) for spread in (0.0, 0.7))
    table = np.array([[spread.expected_tokens(n, depth) for depth in (1, 4, 16)] for n in (1, 2, 8, 64, 512)])
    assert (np.diff(table, axis=0) >= -1e-9).all()
    assert (np.diff(table, axis=1)[2:] >= -1e-9).all()
    assert spread.expected_tokens(64, 16) > plain.expected_tokens(64, 16)
    probs = spread.depth_probs(64, 16)
    assert (np.diff(probs) <= 1e-12).all()
    assert probs[0] <= sum(LLAMA_3_CNN)


def test_a_hostile_draft_brings_nothing() -> None:
    tokens = RoundYield(AcceptanceLaw("hostile", ((0.0,) * 16,)))
    assert tokens.is_worthless
    assert tokens.expected_tokens(512, 16) == 1.0


def profile_of(kind: str = "by_rank", **target: float) -> Profile:
    law = {"kind": kind} | ({"vector": "llama-3-70b-8b-cnn-dailymail"} if kind == "by_rank" else {})
    draft = {"base_seconds": 0.01}
    return parse_profile(json.dumps({"source": "made up", "target": target, "draft": draft, "acceptance": law}))


def choice_of(profile: Profile, fixed: Size | None = None) -> SizeChoice:
    return SizeChoice(profile, RoundYield(profile.acceptance), has_draft=True, is_fixed=fixed)


def test_the_choice_is_the_best_of_all_sizes() -> None:
    profile = profile_of(link_seconds=1.0, compute_base_seconds=0.1, compute_row_seconds=0.01)
    choice = choice_of(profile)
    best = choice.choose(RoundLoad())
    tokens = RoundYield(profile.acceptance)
    for nodes, depth in ((1, 0), (8, 7), (64, 8), (96, 10), (128, 8), (256, 12)):
        seconds = max(1.0, 0.1 + 0.01 * nodes) + 0.01 * depth
        assert best.rate >= tokens.expected_tokens(nodes, depth) / seconds - 1e-9
    assert 64 <= best.size.nodes <= 128, "about the knee of 90 rows"
    assert best.rate == pytest.approx(best.tokens / best.seconds)


def test_plain_decoding_is_one_of_the_choices() -> None:
    linear = profile_of(compute_base_seconds=0.001, compute_row_seconds=1.0)
    assert choice_of(linear).choose(RoundLoad()).size == PLAIN
    streamed = profile_of("hostile", link_seconds=1.0)
    assert choice_of(streamed).choose(RoundLoad()).size == PLAIN


def test_riders_share_the_rows() -> None:
    profile = profile_of(link_seconds=1.0, compute_base_seconds=0.1, compute_row_seconds=0.01)
    choice = choice_of(profile)
    alone, among = choice.choose(RoundLoad()), choice.choose(RoundLoad(8, 8, 8))
    reading = choice.choose(RoundLoad(1, 1, 1, 80))
    assert among.size.nodes < alone.size.nodes / 3
    assert reading.size.nodes < alone.size.nodes
    assert choice_of(profile, Size(64, 7)).choose(RoundLoad(8, 8, 8)).size == Size(8, 7)
