"""The tree that is worth most by published acceptance, as the check of a GPU looks for it."""

from __future__ import annotations

import pytest

from bough.trees.tree import Tree
from loadtest.gpu.chosen import TO_BEAT, chosen


def test_where_nodes_are_free_all_of_them_are_taken_and_drafting_limits_the_levels() -> None:
    swept: list[Tree] = []

    def sweep(tree: Tree) -> float:
        swept.append(tree)
        return 5.6

    found = chosen(16, 80, {1: 5.6, 64: 5.6, 256: 5.6, 768: 5.6}, 0.02, sweep)
    assert (found["nodes"], len(swept[0])) == (768, 768)
    assert found["tokens_a_round"] > 8
    assert found["seconds_a_token"] == pytest.approx((5.6 + found["levels"] * 0.02) / found["tokens_a_round"], rel=1e-3)
    assert found["times_as_fast_as"].keys() == TO_BEAT[16].keys()
    assert found["by"].startswith("best_shape"), "and not an orchestrator's own sizer"
    assert found["times_as_fast_as"]["Sequoia's best, L40"] == pytest.approx(0.56 / found["seconds_a_token"], rel=0.02)


def test_where_nodes_cost_as_much_as_a_sweep_there_are_none() -> None:
    found = chosen(4, 80, {1: 1.0, 64: 64.0, 256: 256.0}, 0.5, lambda _: 1.0)
    assert (found["nodes"], found["levels"], found["tokens_a_round"]) == (1, 0, 1.0)


def test_64_nodes_are_worth_what_the_paper_says() -> None:
    found = chosen(4, 80, {1: 1.0, 64: 1.0}, 0.0, lambda _: 1.0)
    assert found["tokens_a_round"] == 5.92


def test_fewer_layers_than_a_70b_has_are_not_compared_with_a_70b() -> None:
    """Where the host's memory holds half of them, a sweep takes half as long."""
    found = chosen(16, 40, {1: 2.8, 64: 2.8}, 0.02, lambda _: 2.8)
    assert (found["layers"], found["times_as_fast_as"]) == (40, {})


def test_the_figures_to_beat_are_the_published_ones() -> None:
    seconds = {name: round(theirs, 4) for bits in TO_BEAT for name, theirs in TO_BEAT[bits].items()}
    assert seconds["Sequoia, 70B, RTX 4090"] == 0.57
    assert seconds["UMbreLLa, 70B, L40, not offloaded"] == round(1 / 38.5, 4)
