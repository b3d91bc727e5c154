"""Which expansion is below which, against a dictionary: in what a draft has explored, and along trees."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from draft_worker.expansions.expansion_cache import LEVELS, ROOM, ExpansionCache, PendingExpansions
from draft_worker.growth.grower import Candidates

VOCAB = 5
steps = st.lists(st.lists(st.tuples(st.integers(0, 200), st.integers(0, VOCAB - 1)), max_size=20), max_size=10)
nodes = st.lists(st.tuples(st.integers(-1, 200), st.integers(0, VOCAB - 1)), max_size=40)
Place = tuple[int, int]  # the parent's expansion, token


def explored_in(steps: list[list[Place]]) -> tuple[ExpansionCache, dict[Place, int]]:
    """Step by step what is new of it, below what is there; and which expansion each became."""
    explored, index = ExpansionCache(0), dict[Place, int]()
    for step in steps:
        below = [(parent % (len(index) + 1) - 1, token) for parent, token in step]
        new = [place for place in dict.fromkeys(below) if place not in index]
        if new:
            parents, tokens = np.ascontiguousarray(np.array(new, np.int32).T)
            certain = Candidates(np.zeros((len(new), 1), np.int32), np.zeros((len(new), 1), np.float32))
            index |= {place: len(index) + i for i, place in enumerate(new)}
            explored.learn(explored.wanted(parents, tokens), certain)
    return explored, index


def paths_of(explored: ExpansionCache, wanted: PendingExpansions) -> list[tuple[int, ...]]:
    """Tokens from the root down."""
    rows = zip(explored.path_tokens(wanted).tolist(), wanted.depths.tolist(), strict=True)
    return [tuple(tokens[: depth + 1]) for tokens, depth in rows]


@given(steps)
def test_every_expansion_is_found_below_its_parent_only(steps: list[list[Place]]) -> None:
    explored, index = explored_in(steps)
    places = [(parent, token) for parent in range(-1, len(index)) for token in range(VOCAB)]
    parents, tokens = np.ascontiguousarray(np.array(places, np.int32).T)
    assert explored.find(parents, tokens).tolist() == [index.get(place, -1) for place in places]


@given(steps, nodes)
def test_a_trees_nodes_are_found_as_far_as_they_are_explored(steps: list[list[Place]], nodes: list[Place]) -> None:
    explored, index = explored_in(steps)
    below = [(min(parent, number - 1), token) for number, (parent, token) in enumerate(nodes)]
    expected: list[int] = []
    for parent, token in below:
        above = expected[parent] if parent >= 0 else -1
        expected.append(index.get((above, token), -1) if parent < 0 or above >= 0 else -1)
    parents, tokens = np.ascontiguousarray(np.array(below, np.int32).reshape(-1, 2).T)
    assert explored.find_tree(parents, tokens).tolist() == expected


@given(steps, st.integers(0, 10**6))
def test_paths_of_requested_and_of_remaining_nodes(steps: list[list[Place]], which: int) -> None:
    explored, index = explored_in(steps)
    assume(index)
    check_paths(explored, index, which % len(index))


def test_paths_of_more_nodes_than_there_is_room_for() -> None:
    """A chain with many children of its middle, in whose middle the next root is."""
    chain = [[(number, number % VOCAB)] for number in range(3 * LEVELS)]
    middle = 1 + len(chain) // 2
    children = [[(middle + i % 3, VOCAB + i) for i in range(begin, begin + 50)] for begin in (0, 50, 99)]
    explored, index = explored_in([*chain, *children])
    assert len(index) > 2 * ROOM
    assert explored.depths.max() > 2 * LEVELS
    for root in (0, middle - 1, middle, len(chain) - 1, len(index) - 1):
        check_paths(explored, index, root)


def check_paths(explored: ExpansionCache, index: dict[Place, int], root: int) -> None:
    """Of what would be wanted below each expansion, and of the same when one of these has become the root."""
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for (parent, token), number in index.items():
        paths[number] = (*paths[parent], token)
    parents, mark = np.arange(-1, len(index), dtype=np.int32), 10**6
    wanted = explored.wanted(parents, np.full(len(parents), mark, np.int32))
    assert paths_of(explored, wanted) == [(*paths[parent], mark) for parent in parents.tolist()]
    remaining, kept = explored.below(root, 7)
    above = len(paths[root]) - 1
    assert kept.tolist() == [number for number in range(len(index)) if paths[number][: above + 1] == paths[root]]
    assert remaining.depths.tolist() == [len(paths[number]) - len(paths[root]) for number in kept.tolist()]
    wanted = remaining.wanted(np.arange(len(kept), dtype=np.int32), np.full(len(kept), mark, np.int32))
    assert paths_of(remaining, wanted) == [(*paths[number][above:], mark) for number in kept.tolist()]
    assert (wanted.depths == remaining.depths + 1).all()
