"""The tree that an orchestrator's sizer chooses by measured sweeps, as the check of a GPU looks for it."""

from __future__ import annotations

import numpy as np
import pytest

from bough.simulation.acceptance_model import PUBLISHED
from bough.sizing.row_counts import RowCounts
from bough.trees.optimal_tree import best_shape, expected_tokens
from bough.trees.tree import Tree
from loadtest.gpu.chosen import ACCEPTANCE, TO_BEAT, SweepSeconds, chosen

OF_A_GPU = RowCounts(256, 256)
STREAMED = {size: SweepSeconds(5.6, 4.0) for size in (1, 64, 256, 768)}  # the link takes longer


def test_if_nodes_are_free_the_sizer_uses_many_and_drafting_limits_the_levels() -> None:
    swept: list[Tree] = []

    def sweep(tree: Tree) -> float:
        swept.append(tree)
        return 5.7

    found = chosen(16, 80, STREAMED, OF_A_GPU, 0.02, 250, sweep)
    assert found["nodes"] == len(swept[0]) > 256
    assert found["sweep_expected_seconds"] == pytest.approx(5.6, rel=0.01), "it has learnt what sweeps take"
    assert found["draft_seconds"] == pytest.approx(0.02 * found["levels"], rel=0.2)
    assert found["seconds_a_token"] == pytest.approx(
        (found["sweep_seconds"] + found["draft_seconds"]) / found["tokens_a_round"], rel=1e-2
    )
    assert found["times_as_fast_as"].keys() == TO_BEAT[16].keys()
    assert found["times_as_fast_as"]["Sequoia's best, L40"] == pytest.approx(0.56 / found["seconds_a_token"], rel=0.02)


def test_if_a_node_costs_as_much_as_a_sweep_there_are_none() -> None:
    computed = {size: SweepSeconds(float(size), 0.0) for size in (1, 64, 256)}
    found = chosen(4, 80, computed, RowCounts(256, 1), 0.5, 60, lambda _: 1.0)
    assert (found["nodes"], found["levels"], found["tokens_a_round"]) == (1, 0, 1.0)


def test_64_nodes_are_worth_nearly_the_papers_value() -> None:
    """5.92 tokens with the best shape, of which a sizer that has learnt the draft's steps loses little."""
    computed = {size: SweepSeconds(1.0, 0.0) for size in (1, 64)}
    found = chosen(4, 80, computed, RowCounts(64, 64), 0.005, 700, lambda _: 1.0)
    acceptance = np.array([PUBLISHED[ACCEPTANCE]])
    assert (most := expected_tokens(best_shape(acceptance, 64, 24), acceptance)) == pytest.approx(5.92, abs=0.005)
    assert 0.8 * most < found["tokens_a_round"] < 1.15 * most


def test_models_with_fewer_layers_than_a_70b_are_not_compared_with_it() -> None:
    """Where the host's memory holds half of them, a sweep takes half as long."""
    found = chosen(16, 40, {1: SweepSeconds(2.8, 2.0), 8: SweepSeconds(2.8, 2.0)}, OF_A_GPU, 0.02, 40, lambda _: 2.8)
    assert (found["layers"], found["times_as_fast_as"]) == (40, {})


def test_the_figures_to_beat_are_published() -> None:
    seconds = {name: round(theirs, 4) for bits in TO_BEAT for name, theirs in TO_BEAT[bits].items()}
    assert seconds["Sequoia, 70B, RTX 4090"] == 0.57
    assert seconds["UMbreLLa, 70B, L40, not offloaded"] == round(1 / 38.5, 4)
