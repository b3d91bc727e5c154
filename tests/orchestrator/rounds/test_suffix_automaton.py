"""Continuations from a text's own past, against a search through all of it."""

from __future__ import annotations

import math
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from bough.trees.tree import Tree
from orchestrator.rounds.prompt_lookup import (
    DraftOpinion,
    Follower,
    Guesses,
    GuessKind,
    LookupLimits,
    SuffixAutomaton,
    grow_continuations,
)

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


def grow(text: list[int], limits: LookupLimits) -> Guesses:
    return grow_continuations(automaton(text), Tree.root(text[-1]), limits, by_length)


@given(texts, st.integers(0, 12), st.integers(0, 5))
def test_trees_are_valid_and_hold_what_followed(text: list[int], max_nodes: int, max_depth: int) -> None:
    guesses = grow(text, LookupLimits(max_nodes, max_depth, frozenset({0})))
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
    large = grow(text, LookupLimits(40, 6)).tree
    small = grow(text, LookupLimits(max_nodes, 6)).tree
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


def test_a_long_text_takes_kilobytes_a_thousand_tokens_not_megabytes() -> None:
    tokens = [(7 * token * token + token // 3) % 4001 for token in range(4000)]
    tracemalloc.start()
    index = automaton(tokens, 24)
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.num_tokens == 4000
    assert used_bytes / 4000 < 1500
