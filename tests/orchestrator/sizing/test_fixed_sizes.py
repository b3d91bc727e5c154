"""Trees of a fixed size: what was asked for, and what is left of a sweep that others share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bough.protocol.decision import Mode
from bough.protocol.generation import Speculation
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, Growth, StaticShape
from orchestrator.sizing.plans import MIN_SHARE, RoundPlan, WorkerFacts
from orchestrator.sizing.tree_sizer import TreeSizer
from tests.fakes.made_rounds import FLAT, ROOT, STEEP, MadeRounds, situation

DEFAULT = Speculation()


def new_fixed() -> TreeSizer:
    return TreeSizer(BestFirst(64, 16, 7), max_depth=24, sweep_nodes=64)


def plan_of(num_sharing: int = 1, speculation: Speculation = DEFAULT, num_context: int = 0) -> RoundPlan:
    target = WorkerFacts("target", "target", 1024, FLAT, num_sharing)
    return new_fixed().plan(situation(speculation=speculation, target=target, num_context=num_context))


def budget(num_sharing: int, speculation: Speculation = DEFAULT, num_context: int = 0) -> int:
    return plan_of(num_sharing, speculation, num_context).tree.growth.budget


@pytest.mark.parametrize(("num_sharing", "expected"), [(1, 64), (2, 32), (8, 8), (16, MIN_SHARE), (100, MIN_SHARE)])
def test_sessions_share_the_nodes_of_a_sweep(num_sharing: int, expected: int) -> None:
    assert budget(num_sharing) == expected


@pytest.mark.parametrize(("num_context", "expected"), [(0, 64), (20, 44), (59, 5), (61, MIN_SHARE), (9000, MIN_SHARE)])
def test_a_prompt_takes_its_rows_from_the_tree(num_context: int, expected: int) -> None:
    assert budget(1, num_context=num_context) == expected
    assert budget(1, Speculation(budget=64), num_context) == 64


def test_a_size_that_a_request_asks_for_is_not_shared() -> None:
    assert budget(8, Speculation(budget=40)) == 40
    assert budget(8, Speculation(growth=StaticShape((0, 0, 1)))) == 4


@pytest.mark.parametrize(
    ("growth", "depth", "expected"),
    [
        (BestFirst(64, 16, 7), 2, BestFirst(64, 16, 2)),
        (StaticShape((0, 0, 1, 3, 4)), 4, StaticShape((0, 0, 1, 3, 4))),
        (StaticShape((0, 0, 1, 3, 4)), 2, StaticShape((0, 0, 1))),
        (StaticShape((0, 0, 1, 3, 4)), 0, StaticShape(())),
        (StaticShape.chains(3, 9), 3, StaticShape.chains(3, 3)),
    ],
)
def test_growths_of_fewer_levels(growth: Growth, depth: int, expected: Growth) -> None:
    assert growth.limited(growth.budget, depth) == expected
    assert growth.limited(growth.budget, depth).depth <= depth


@pytest.mark.parametrize(("num_sharing", "width"), [(1, 16), (2, 16), (4, 8), (8, 4), (100, MIN_SHARE)])
def test_a_step_of_a_small_tree_expands_half_of_it_at_most(num_sharing: int, width: int) -> None:
    """Eight sessions' steps are then of half as many rows, and their trees the same."""
    growth = plan_of(num_sharing).tree.growth
    assert isinstance(growth, BestFirst)
    assert growth.width == width


def test_nothing_that_rounds_come_to_changes_the_size() -> None:
    world = MadeRounds(new_fixed(), sweep=STEEP, claimed=(0.97, 0.01), true=(0.0, 0.0))
    rounds = world.play(30)
    assert {played.plan for played in rounds} == {rounds[0].plan}
    assert {played.plan.tree.growth for played in rounds} == {BestFirst(64, 16, 7)}


def test_of_two_trees_the_best_nodes_are_sent() -> None:
    sizer = new_fixed()
    sizer.plan(situation(speculation=Speculation(budget=3), lookup=2))
    drafted = Tree.of([ROOT, 1, 2], [-1, 0, 0], np.log([1.0, 0.6, 0.1]).tolist())
    looked_up = Tree.of([ROOT, 3], [-1, 0], np.log([1.0, 0.5]).tolist())
    proposal = sizer.propose("s", drafted, looked_up)
    assert proposal.tree.tokens.tolist() == [ROOT, 1, 3]
    assert not proposal.may_leave_out


def test_decisions_are_recorded_as_fixed_or_off_and_forgotten_sessions_count_anew() -> None:
    world = MadeRounds(new_fixed())
    world.play(2)
    world.round(replace(world.base, speculation=Speculation(disabled=True)))
    decisions = world.log.of("s")
    assert [(each.number, each.mode) for each in decisions] == [(1, Mode.FIXED), (2, Mode.FIXED), (3, Mode.OFF)]
    assert all(each.tokens >= 1 and each.seconds.sweep >= 1.0 for each in decisions)
    assert world.log.calibrations() == (), "it predicts nothing"
    world.sizer.forget("s")
    assert world.play(1)[0].decision.number == 1
