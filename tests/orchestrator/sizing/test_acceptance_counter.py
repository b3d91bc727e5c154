"""What the orchestrator counts of verdicts: by whom a child stood, and which was taken."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from bough.trees.acceptance import by_rank
from bough.trees.scheme_acceptance import DepthCounts, SchemeAcceptance
from bough.trees.tree import Tree
from bough.trees.tree_plan import Scheme
from orchestrator.sizing.totals import HALF_LIFE_ROUNDS, NUM_DEPTHS, NUM_RANKS, AcceptanceCounter

FOREVER = math.inf  # rounds


def tree(*parents: int) -> Tree:
    """With these parents of node 1 and on."""
    return Tree.of(list(range(len(parents) + 1)), [-1, *parents], [-0.5] * (len(parents) + 1))


def counted(counter: AcceptanceCounter, scheme: Scheme = Scheme.TARGET) -> SchemeAcceptance:
    (counts,) = (one for one in counter.counts() if one.scheme is scheme)
    return counts


def test_every_node_that_was_walked_through_counts_once() -> None:
    """0 has 1, 2, 3; 2 has 4, 5; 5 has 6: the walk goes by the second of three, the second of two, and ends."""
    counter = AcceptanceCounter(FOREVER)
    counter.observe(Scheme.TARGET, tree(0, 0, 0, 2, 2, 5), (2, 5))
    by_depth = counted(counter).depths
    assert [depth.accepted for depth in by_depth] == [(0, 1), (0, 1), (0, 0)]
    assert [depth.rejected for depth in by_depth] == [(0, 0), (0, 0), (1, 0)]


def test_nodes_without_children_and_trees_without_guesses_do_not_count() -> None:
    counter = AcceptanceCounter(FOREVER)
    counter.observe(Scheme.TARGET, tree(), ())
    assert counter.counts() == ()
    counter.observe(Scheme.TARGET, tree(0, 0), (2,))
    assert counted(counter) == SchemeAcceptance(Scheme.TARGET, 1, (DepthCounts((0, 1), (0, 0)),))


def test_rank_is_the_place_among_siblings_wherever_they_stand() -> None:
    """Best-first trees list siblings among others' children."""
    counter = AcceptanceCounter(FOREVER)
    counter.observe(Scheme.TARGET, tree(0, 1, 0, 1, 0), (5,))
    counter.observe(Scheme.TARGET, tree(0, 1, 0, 1, 0), (1, 4))
    counter.observe(Scheme.TARGET, tree(0, 1, 0, 1, 0), ())
    by_depth = counted(counter).depths
    assert by_depth == (DepthCounts((1, 0, 1), (0, 0, 1)), DepthCounts((0, 1, 0), (0, 0, 0)))


def test_what_was_added_to_a_sample_is_no_rank_of_it() -> None:
    """One of two children was drawn; the target took the other."""
    counter = AcceptanceCounter(FOREVER)
    added = replace(tree(0, 0), draws=np.array([1], np.int32))
    counter.observe(Scheme.WITHOUT_REPLACEMENT, added, (2,))
    counter.observe(Scheme.WITHOUT_REPLACEMENT, added, (1,))
    assert counted(counter, Scheme.WITHOUT_REPLACEMENT).depths == (DepthCounts((1,), (1,)),)


def test_schemes_are_counted_apart() -> None:
    counter = AcceptanceCounter(FOREVER)
    counter.observe(Scheme.TARGET, tree(0), (1,))
    counter.observe(Scheme.WITHOUT_REPLACEMENT, tree(0), ())
    assert counted(counter).depths == (DepthCounts((1,), (0,)),)
    assert counted(counter, Scheme.WITHOUT_REPLACEMENT).depths == (DepthCounts((0,), (1,)),)


def test_old_rounds_are_forgotten() -> None:
    """The workload changes from always right to always wrong: after a half-life half of what counts is new."""
    counter = AcceptanceCounter()
    for _ in range(20 * HALF_LIFE_ROUNDS):
        counter.observe(Scheme.TARGET, tree(0), (1,))
    for half_lives in (1, 2, 3):
        for _ in range(HALF_LIFE_ROUNDS):
            counter.observe(Scheme.TARGET, tree(0), ())
        assert by_rank(counted(counter)).tolist() == [pytest.approx([0.5**half_lives], rel=1e-3)]
    assert counted(counter).num_rounds == 23 * HALF_LIFE_ROUNDS


def test_what_is_deeper_or_wider_than_the_table_is_counted_at_its_edge() -> None:
    counter = AcceptanceCounter(FOREVER)
    chain = tree(*range(NUM_DEPTHS + 2))
    counter.observe(Scheme.TARGET, chain, tuple(range(1, NUM_DEPTHS + 3)))
    by_depth = counted(counter).depths
    assert len(by_depth) == NUM_DEPTHS
    assert (by_depth[0].accepted, by_depth[-1].accepted) == ((1,), (3,))
    wide = AcceptanceCounter(FOREVER)
    wide.observe(Scheme.TARGET, tree(*[0] * (NUM_RANKS + 1)), (NUM_RANKS + 1,))
    (depth,) = counted(wide).depths
    assert np.flatnonzero(depth.rejected).tolist() == [NUM_RANKS - 1]  # of those that are counted none was accepted
    assert sum(depth.accepted) == 0


def test_a_tree_of_which_nothing_was_drawn_is_no_count() -> None:
    """All of it was looked up; the answer used to end with an error until somebody had drawn something."""
    counter = AcceptanceCounter(FOREVER)
    counter.observe(Scheme.TRAVERSAL, replace(tree(0, 1), draws=np.zeros(0, np.int32)), (1,))
    assert counter.counts() == ()
