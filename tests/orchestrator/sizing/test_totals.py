"""What the orchestrator records of rounds: decisions, calibrations by draft worker, and counts of accepted guesses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from bough.protocol.decision import Decision, Mode, RoundSeconds
from bough.protocol.ids import ScopedId
from bough.trees.acceptance import by_rank
from bough.trees.scheme_acceptance import DepthCounts, SchemeAcceptance
from bough.trees.tree import Tree
from bough.trees.tree_plan import Scheme
from orchestrator.sizing.totals import (
    HALF_LIFE_ROUNDS,
    MAX_DRAFTS,
    MAX_ROUNDS,
    MAX_SESSIONS,
    NUM_DEPTHS,
    NUM_RANKS,
    AcceptanceCounter,
    DecisionLog,
)


def decision(number: int = 1, draft_id: str = "d", expected_tokens: float = 2.0, tokens: int = 3) -> Decision:
    """A round that was expected to take a second, and took two."""
    return Decision(
        number,
        Mode.DRAFT,
        draft_id,
        num_grown=8,
        expected_tokens=expected_tokens,
        tokens=tokens,
        expected=RoundSeconds(draft=0.25, sweep=0.75),
        seconds=RoundSeconds(draft=0.5, network=0.1, queue=0.1, sweep=1.2, other=0.1),
    )


def test_rounds_are_returned_in_order_by_default_those_of_the_last_session() -> None:
    log = DecisionLog()
    for number in (1, 2, 3):
        log.add(ScopedId("a"), decision(number))
    log.add(ScopedId("b"), decision(7))
    assert [each.number for each in log.of(ScopedId("a"))] == [1, 2, 3]
    assert [each.number for each in log.of(ScopedId(""))] == [7]
    log.add(ScopedId("a"), decision(4))
    assert [each.number for each in log.of(ScopedId(""))] == [1, 2, 3, 4]
    assert log.of(ScopedId("c")) == ()
    assert DecisionLog().of(ScopedId("")) == ()


def test_only_the_last_rounds_sessions_and_drafts_are_kept() -> None:
    log = DecisionLog()
    for number in range(MAX_ROUNDS + 3):
        log.add(ScopedId("long"), decision(number))
    assert [log.of(ScopedId("long"))[0].number, len(log.of(ScopedId("long")))] == [3, MAX_ROUNDS]
    for index in range(MAX_SESSIONS):
        log.add(ScopedId(f"s{index}"), decision(draft_id=f"d{index}"))
    assert log.of(ScopedId("long")) == ()
    assert len(log.of(ScopedId("s0"))) == 1
    log.add(ScopedId("s0"), decision())
    log.add(ScopedId("one more"), decision())
    assert len(log.of(ScopedId("s0"))) == 2, "used last, not first"
    assert log.of(ScopedId("s1")) == ()
    assert len(log.calibrations()) == MAX_DRAFTS
    assert "d0" not in {each.draft_id for each in log.calibrations()}


def test_calibrations_are_means_by_draft_worker() -> None:
    log = DecisionLog()
    for _ in range(10):
        log.add(ScopedId("s"), decision(draft_id="steady"))
    log.add(ScopedId("s"), decision(draft_id="other", expected_tokens=1.5, tokens=1))
    steady, other = log.calibrations()
    assert (steady.draft_id, steady.num_rounds) == ("steady", 10)
    assert (steady.expected_tokens, steady.realised_tokens) == (pytest.approx(2.0), pytest.approx(3.0))
    assert (steady.expected_seconds, steady.realised_seconds) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (other.num_rounds, other.expected_tokens, other.realised_tokens) == (1, 1.5, 1.0)


def test_old_rounds_have_less_weight() -> None:
    log = DecisionLog()
    for tokens in (1, 9):
        for _ in range(300):
            log.add(ScopedId("s"), decision(tokens=tokens))
    (calibration,) = log.calibrations()
    assert calibration.num_rounds == 600
    old = 0.5 ** (300 / HALF_LIFE_ROUNDS)
    assert calibration.realised_tokens == pytest.approx((9.0 + old * 1.0) / (1 + old))


@pytest.mark.parametrize("without", ["draft", "tree", "prediction"])
def test_rounds_without_a_prediction_for_a_draft_do_not_count_for_it(without: str) -> None:
    log, entry = DecisionLog(), decision()
    if without == "draft":
        entry.draft_id = ""
    elif without == "tree":
        entry.num_grown = 1
    else:
        entry.expected = RoundSeconds()
    log.add(ScopedId("s"), entry)
    assert log.calibrations() == ()
    assert log.of(ScopedId("s")) == (entry,)


FOREVER = math.inf  # rounds


def tree(*parents: int) -> Tree:
    """With these parents of node 1 and on."""
    return Tree.of(list(range(len(parents) + 1)), [-1, *parents], [-0.5] * (len(parents) + 1))


def counted(counter: AcceptanceCounter, scheme: Scheme = Scheme.TARGET) -> SchemeAcceptance:
    (counts,) = (one for one in counter.counts() if one.scheme is scheme)
    return counts


def test_every_visited_node_counts_once() -> None:
    """0 has 1, 2, 3; 2 has 4, 5; 5 has 6: the walk goes by the second of three, the second of two, and ends."""
    counter = AcceptanceCounter(FOREVER)
    counter.observe(Scheme.TARGET, tree(0, 0, 0, 2, 2, 5), (2, 5))
    by_depth = counted(counter).depths
    assert [depth.accepted for depth in by_depth] == [(0, 1), (0, 1), (0, 0)]
    assert [depth.rejected for depth in by_depth] == [(0, 0), (0, 0), (1, 0)]


def test_nodes_without_children_and_trees_without_guesses_do_not_count() -> None:
    counter = AcceptanceCounter(FOREVER)
    counter.observe(Scheme.TARGET, tree(), ())
    counter.observe(Scheme.TRAVERSAL, replace(tree(0, 1), draws=np.zeros(0, np.int32)), (1,))  # all of it was looked up
    assert counter.counts() == ()
    counter.observe(Scheme.TARGET, tree(0, 0), (2,))
    assert counted(counter) == SchemeAcceptance(Scheme.TARGET, 1, (DepthCounts((0, 1), (0, 0)),))


def test_rank_is_the_position_among_siblings() -> None:
    """Best-first trees list siblings among others' children."""
    counter = AcceptanceCounter(FOREVER)
    counter.observe(Scheme.TARGET, tree(0, 1, 0, 1, 0), (5,))
    counter.observe(Scheme.TARGET, tree(0, 1, 0, 1, 0), (1, 4))
    counter.observe(Scheme.TARGET, tree(0, 1, 0, 1, 0), ())
    by_depth = counted(counter).depths
    assert by_depth == (DepthCounts((1, 0, 1), (0, 0, 1)), DepthCounts((0, 1, 0), (0, 0, 0)))


def test_nodes_added_to_a_sample_have_no_rank_in_it() -> None:
    """One of two children was drawn; the target took the other."""
    counter = AcceptanceCounter(FOREVER)
    added = replace(tree(0, 0), draws=np.array([1], np.int32))
    counter.observe(Scheme.WITHOUT_REPLACEMENT, added, (2,))
    counter.observe(Scheme.WITHOUT_REPLACEMENT, added, (1,))
    assert counted(counter, Scheme.WITHOUT_REPLACEMENT).depths == (DepthCounts((1,), (1,)),)


def test_schemes_are_counted_separately() -> None:
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


def test_nodes_beyond_the_tables_depth_or_width_are_counted_at_its_edge() -> None:
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
