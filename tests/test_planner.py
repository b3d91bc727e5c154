"""How large trees are: what was asked for, and what is left of a sweep that others share."""

from __future__ import annotations

import pytest

from bough.generation import Speculation
from bough.growth import NO_TREE, BestFirst, Chains, Growth, StaticShape
from orchestrator.planner import MIN_SHARE, FixedPlanner, Rest

PLANNER = FixedPlanner(BestFirst(64, 16, 7), sweep_nodes=64)
DEFAULT = Speculation()


def budget(num_sharing: int, speculation: Speculation = DEFAULT, num_context: int = 0) -> int:
    return PLANNER.plan("s", 100, speculation, Rest(num_sharing, num_context)).growth.budget


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


def test_the_end_is_near_or_speculation_is_off() -> None:
    assert PLANNER.plan("s", 1, DEFAULT, Rest()) == NO_TREE
    assert PLANNER.plan("s", 9, Speculation(disabled=True), Rest()) == NO_TREE


@pytest.mark.parametrize(
    ("growth", "depth", "expected"),
    [
        (BestFirst(64, 16, 7), 2, BestFirst(64, 16, 2)),
        (StaticShape((0, 0, 1, 3, 4)), 4, StaticShape((0, 0, 1, 3, 4))),
        (StaticShape((0, 0, 1, 3, 4)), 2, StaticShape((0, 0, 1))),
        (StaticShape((0, 0, 1, 3, 4)), 0, StaticShape(())),
        (Chains(3, 9), 3, Chains(3, 3)),
    ],
)
def test_growths_of_fewer_levels(growth: Growth, depth: int, expected: Growth) -> None:
    assert growth.no_deeper(depth) == expected
    assert growth.no_deeper(depth).depth <= depth


@pytest.mark.parametrize(("num_sharing", "width"), [(1, 16), (2, 16), (4, 8), (8, 4), (100, MIN_SHARE)])
def test_a_step_of_a_small_tree_expands_half_of_it_at_most(num_sharing: int, width: int) -> None:
    """Eight sessions' steps are then of half as many rows, and their trees the same."""
    growth = PLANNER.plan("s", 100, DEFAULT, Rest(num_sharing)).growth
    assert isinstance(growth, BestFirst)
    assert growth.width == width
