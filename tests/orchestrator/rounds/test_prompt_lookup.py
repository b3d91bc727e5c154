"""Guesses from a session's own text, compared with a search through all of it, and what is learnt of them."""

from __future__ import annotations

import asyncio
import math
import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.trees.tree import Tree
from orchestrator.rounds.prompt_lookup import (
    MAX_READ,
    Acceptance,
    DraftOpinion,
    Follower,
    Guesses,
    GuessKind,
    LookupLimits,
    PromptLookup,
    SuffixAutomaton,
    assumed_probability,
    grow_continuations,
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


def test_a_new_session_starts_from_what_others_have_learnt_and_then_learns_itself() -> None:
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


def test_only_guesses_with_a_chosen_parent_are_learnt_from() -> None:
    """A guess below a wrong one was never put to the test."""
    kinds = (GuessKind(2, 0, 1), GuessKind(2, 1, 1), GuessKind(3, 0, 2), GuessKind(3, 1, 2))
    tree = Tree.of([7, 1, 2, 3, 4], [-1, 0, 0, 1, 2], [0.0, -1, -1, -1, -1])
    shared = Acceptance(lambda _: 0.5)
    PromptLookup(shared).observe(Guesses(tree, kinds), [2, 4, 9])
    seen = [shared.probability(kind) for kind in kinds]
    assert seen[0] < 0.5 < seen[1]
    assert seen[2] == 0.5 < seen[3]


def test_guesses_that_keep_failing_are_replaced_by_better_ones() -> None:
    """With room for one guess, the second choice is taken once the first has proved wrong often enough."""
    text = [1, 2, 1, 3, 1, 3, 1]
    guessing, limits = lookup(), LookupLimits(1, 1)
    assert grow(guessing, text, limits).tree.tokens.tolist() == [1, 3]
    for _ in range(60):
        guessing.observe(grow(guessing, text, LookupLimits(2, 1)), [2])
    assert grow(guessing, text, limits).tree.tokens.tolist() == [1, 2]


def test_a_long_prompt_is_read_over_several_rounds() -> None:
    """It must not hold up the rounds of other sessions."""
    tokens, guessing = [1, 2] * MAX_READ, lookup()
    assert [len(grow(guessing, tokens).tree) for _ in range(2)] == [1, 7]


async def test_a_long_prompt_is_read_off_the_event_loop_without_delaying_rounds() -> None:
    """Whatever the event loop does meanwhile; the guesses are the same."""
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
def test_the_drafts_probability_of_a_guess_counts_from_the_start(match_length: int) -> None:
    """Guessed otherwise by the draft it is worth less than where the draft is silent; likely to both, more."""
    worth = [assumed_probability(GuessKind(match_length, 0, 1, draft)) for draft in DraftOpinion]
    assert worth[1:] == sorted(worth[1:])
    otherwise, silent, likely = DraftOpinion.OTHERWISE, DraftOpinion.SILENT, DraftOpinion.LIKELY
    assert 0 < worth[otherwise.value] < worth[silent.value] < worth[likely.value] < 1


def test_guesses_that_the_draft_disagrees_with_are_learnt_separately() -> None:
    guessing, text = lookup(), [1, 2, 1]
    drafted = Tree.of([1, 9], [-1, 0], [0.0, -0.1])
    for _ in range(60):
        guessing.observe(guessing.grow(text, drafted, LIMITS), [9])
        guessing.observe(grow(guessing, text), [2])
    silent, otherwise = (guessing.grow(text, tree, LIMITS).tree.log_probs[1] for tree in (Tree.root(1), drafted))
    assert math.exp(silent) > 0.8
    assert math.exp(otherwise) < 0.01


VOCAB = 5
texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60)


def automaton(text: list[int], max_match: int = 6) -> SuffixAutomaton:
    index = SuffixAutomaton(max_match)
    index.extend(text)
    return index


def what_followed(text: list[int], suffix: list[int]) -> dict[int, tuple[int, int]]:
    """For each token that has followed: how often, and where last."""
    found: dict[int, tuple[int, int]] = {}
    for end in range(len(suffix), len(text)):
        if text[end - len(suffix) : end] == suffix:
            count, _ = found.get(text[end], (0, 0))
            found[text[end]] = (count + 1, end)
    return found


def naive_followers(text: list[int], context: list[int], max_match: int, limit: int) -> list[tuple[int, int, int]]:
    """(token, match_length, count) of what has followed the longest end of `context`, then shorter ones."""
    found: list[tuple[int, int, int]] = []
    for length in range(min(max_match, len(context)), 0, -1):
        followed = what_followed(text, context[-length:])
        for token, (count, _) in sorted(followed.items(), key=lambda entry: (-entry[1][0], -entry[1][1])):
            if token not in {known for known, _, _ in found}:
                found.append((token, length, count))
    return found[:limit]


def shown(followers: list[Follower]) -> list[tuple[int, int, int]]:
    return [(follower.token, follower.match_length, follower.times) for follower in followers]


@given(texts, st.integers(1, 8), st.integers(1, VOCAB))
def test_followers_of_the_end_equal_a_naive_search(text: list[int], max_match: int, limit: int) -> None:
    """Longest match first, then by count, then the most recent; at every moment of an incremental build."""
    index = SuffixAutomaton(max_match)
    for length in range(1, len(text) + 1):
        index.extend(text[length - 1 : length])
        found = shown(index.followers(index.longest_match(), limit))
        assert found == naive_followers(text[:length], text[:length], max_match, limit)


@given(texts, st.data())
def test_followers_of_a_continuation_equal_a_naive_search(text: list[int], data: st.DataObject) -> None:
    """Below a node the context is the text with the path to that node."""
    index, path = automaton(text), []
    match = index.longest_match()
    for _ in range(8):
        followers = index.followers(match, VOCAB)
        assert shown(followers) == naive_followers(text, text + path, 6, VOCAB)
        if not followers:
            return
        chosen = data.draw(st.sampled_from(followers))
        path.append(chosen.token)
        match = chosen.match


def by_length(kind: GuessKind) -> float:
    """An estimate that likes long matches and first choices."""
    return math.log(kind.match_length / (kind.match_length + 1) / (kind.rank + 1))


def continuations(text: list[int], limits: LookupLimits) -> Guesses:
    return grow_continuations(automaton(text), Tree.root(text[-1]), limits, by_length)


@given(texts, st.integers(0, 12), st.integers(0, 5))
def test_trees_are_valid_and_contain_what_followed(text: list[int], max_nodes: int, max_depth: int) -> None:
    guesses = continuations(text, LookupLimits(max_nodes, max_depth, frozenset({0})))
    tree, depths = guesses.tree, guesses.tree.depths()
    tree.validate(VOCAB, max_nodes + 1)
    assert tree.tokens[0] == text[-1]
    assert depths.max() <= max_depth
    assert len(guesses.kinds) == len(tree) - 1
    for node, kind in enumerate(guesses.kinds, start=1):
        parent = int(tree.parents[node])
        context = text + [int(tree.tokens[step]) for step in tree.path(parent)[1:]]
        entry = naive_followers(text, context, 6, VOCAB)[kind.rank]
        assert (int(tree.tokens[node]), kind.match_length, kind.depth) == (entry[0], entry[1], depths[node])
        assert tree.tokens[parent] != 0, "nothing follows a closed token"


@given(texts, st.integers(1, 12))
def test_a_smaller_tree_is_the_best_part_of_a_larger_one(text: list[int], max_nodes: int) -> None:
    large = continuations(text, LookupLimits(40, 6)).tree
    small = continuations(text, LookupLimits(max_nodes, 6)).tree
    best = sorted(large.scores().tolist(), reverse=True)[: len(small)]
    assert sorted(small.scores().tolist(), reverse=True) == best
    assert small.tokens.tolist() == large.tokens.tolist()[: len(small)]


def test_guesses_know_whether_the_draft_agrees() -> None:
    drafted = Tree.of([1, 2, 4, 9], [-1, 0, 0, 1], [0.0, -0.5, -1.0, -1.0])
    text = automaton([1, 2, 3, 1, 4, 5, 1])
    guesses = grow_continuations(text, drafted, LookupLimits(4, 2), by_length)
    kinds = {int(token): kind.draft for token, kind in zip(guesses.tree.tokens[1:], guesses.kinds, strict=True)}
    assert kinds == {
        4: DraftOpinion.POSSIBLE,
        5: DraftOpinion.SILENT,
        2: DraftOpinion.LIKELY,
        3: DraftOpinion.OTHERWISE,
    }


def test_a_long_text_takes_kilobytes_per_thousand_tokens() -> None:
    tokens = [(7 * token * token + token // 3) % 4001 for token in range(4000)]
    tracemalloc.start()
    index = automaton(tokens, 24)
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.num_tokens == 4000
    assert used_bytes / 4000 < 1500
