"""Guesses from a session's own text, and what is learnt of them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable

import pytest

from bough.trees.tree import Tree
from orchestrator.rounds.prompt_lookup import (
    MAX_READ,
    Acceptance,
    DraftOpinion,
    Guesses,
    GuessKind,
    LookupLimits,
    PromptLookup,
    assumed_probability,
)
from tests.fakes.waiting import until

LIMITS = LookupLimits(max_nodes=6, max_depth=6)


def grow(guessing: PromptLookup, text: list[int], limits: LookupLimits = LIMITS) -> Guesses:
    """Without a draft."""
    return guessing.grow(text, Tree.root(text[-1]), limits)


def lookup() -> PromptLookup:
    return PromptLookup(Acceptance(assumed_probability))


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_estimates_converge_to_a_known_process(probability: float) -> None:
    """From any prior; two standard errors of the 500 trials remembered are at most 0.045."""
    rng, kind, other = random.Random(1), GuessKind(5, 0, 1), GuessKind(5, 1, 1)
    acceptance = Acceptance(lambda _: 0.3)
    for _ in range(4000):
        acceptance.observe(kind, rng.random() < probability)
    assert acceptance.probability(kind) == pytest.approx(probability, abs=0.05)
    assert acceptance.probability(other) == 0.3


def test_estimates_follow_a_process_that_changes() -> None:
    kind = GuessKind(1, 0, 1)
    acceptance = Acceptance(lambda _: 0.5)
    for was_right in [True] * 5000 + [False] * 2500:
        acceptance.observe(kind, was_right)
    assert acceptance.probability(kind) < 0.02


def test_a_new_session_starts_from_what_others_have_seen_and_then_goes_its_own_way() -> None:
    shared = Acceptance(assumed_probability)
    kind = GuessKind(1, 0, 1)
    guesses = Guesses(Tree.of([7, 8], [-1, 0], [0.0, -1.0]), (kind,))
    first = PromptLookup(shared)
    for _ in range(200):
        first.observe(guesses, [8, 9])
    text = [1, 2, 3, 1]
    second = PromptLookup(shared)
    before = math.exp(grow(second, text).tree.log_probs[1])
    assert before > 0.9
    for _ in range(100):
        second.observe(guesses, [9])
    assert math.exp(grow(second, text).tree.log_probs[1]) < 0.2
    assert math.exp(grow(PromptLookup(shared), text).tree.log_probs[1]) == pytest.approx(2 / 3, abs=0.05)


def test_only_guesses_whose_parent_was_chosen_are_learnt_from() -> None:
    """A guess below a wrong one was never put to the test."""
    kinds = (GuessKind(2, 0, 1), GuessKind(2, 1, 1), GuessKind(3, 0, 2), GuessKind(3, 1, 2))
    tree = Tree.of([7, 1, 2, 3, 4], [-1, 0, 0, 1, 2], [0.0, -1, -1, -1, -1])
    shared = Acceptance(lambda _: 0.5)
    PromptLookup(shared).observe(Guesses(tree, kinds), [2, 4, 9])
    seen = [shared.probability(kind) for kind in kinds]
    assert seen[0] < 0.5 < seen[1]
    assert seen[2] == 0.5 < seen[3]


def test_guesses_that_keep_failing_give_way_to_better_ones() -> None:
    """With room for one guess, the second choice is taken once the first has proved wrong often enough."""
    text = [1, 2, 1, 3, 1, 3, 1]
    guessing, limits = lookup(), LookupLimits(1, 1)
    assert grow(guessing, text, limits).tree.tokens.tolist() == [1, 3]
    for _ in range(60):
        guessing.observe(grow(guessing, text, LookupLimits(2, 1)), [2])
    assert grow(guessing, text, limits).tree.tokens.tolist() == [1, 2]


def test_text_is_read_as_it_grows() -> None:
    guessing = lookup()
    assert len(grow(guessing, [5, 6, 7]).tree) == 1
    assert grow(guessing, [5, 6, 7, 5]).tree.tokens.tolist()[:3] == [5, 6, 7]


def test_a_long_prompt_is_read_over_several_rounds() -> None:
    """It must not hold up the rounds of other sessions."""
    tokens, guessing = [1, 2] * MAX_READ, lookup()
    assert [len(grow(guessing, tokens).tree) for _ in range(2)] == [1, 7]


async def test_a_long_prompt_is_read_beside_the_event_loop_and_no_round_waits_for_it() -> None:
    """Whatever the event loop does meanwhile; then the guesses are what they would have been."""
    tokens, guessing, at_once = [1, 2, 3] * MAX_READ, lookup(), lookup()
    works: list[Callable[[], None]] = []
    may_go_on = asyncio.Semaphore(0)

    async def run(work: Callable[[], None]) -> None:
        await may_go_on.acquire()
        works.append(work)
        work()

    with guessing.reading(tokens, run):
        for number in range(3):
            assert len(grow(guessing, tokens).tree) == 1, "some of the text has not been read"
            may_go_on.release()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(works) == number + 1
        await until(lambda: not guessing._is_reading)
        for _ in range(3):
            expected = grow(at_once, tokens).tree
        assert len(expected) > 1
        assert grow(guessing, tokens).tree.tokens.tolist() == expected.tokens.tolist()
        more = [*tokens, 9, 9, 9]
        assert grow(guessing, more).tree.tokens.tolist() == grow(at_once, more).tree.tokens.tolist()
    assert len(works) == 3


@pytest.mark.parametrize("match_length", [1, 30])
def test_what_the_draft_thinks_of_a_guess_counts_from_the_start(match_length: int) -> None:
    """Guessed otherwise by the draft it is worth less than where the draft is silent; likely to both, more."""
    worth = [assumed_probability(GuessKind(match_length, 0, 1, draft)) for draft in DraftOpinion]
    assert worth[1:] == sorted(worth[1:])
    otherwise, silent, likely = DraftOpinion.OTHERWISE, DraftOpinion.SILENT, DraftOpinion.LIKELY
    assert 0 < worth[otherwise.value] < worth[silent.value] < worth[likely.value] < 1


def test_what_the_draft_guessed_otherwise_is_learnt_apart() -> None:
    guessing, text = lookup(), [1, 2, 1]
    drafted = Tree.of([1, 9], [-1, 0], [0.0, -0.1])
    for _ in range(60):
        guessing.observe(guessing.grow(text, drafted, LIMITS), [9])
        guessing.observe(grow(guessing, text), [2])
    silent, otherwise = (guessing.grow(text, tree, LIMITS).tree.log_probs[1] for tree in (Tree.root(1), drafted))
    assert math.exp(silent) > 0.8
    assert math.exp(otherwise) < 0.01
