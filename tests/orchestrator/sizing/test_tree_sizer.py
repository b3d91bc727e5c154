"""What a TreeSizer chooses, against what would be best where seconds and chances are known."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import Mode
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst
from orchestrator.sizing.plans import Sizer
from orchestrator.sizing.tree_sizer import PROBE, TreeSizer
from tests.fakes.made_rounds import (
    DEFAULT,
    FLAT,
    GOOD,
    ROOT,
    STEEP,
    STEP,
    WRONG,
    MadeRounds,
    mean_nodes,
    new_sizer,
    seconds_per_token,
    situation,
)

WEAK = (0.35, 0.08, 0.05)
SURE = (0.97, 0.01)  # what a draft says of its guesses


@pytest.mark.parametrize(
    ("sweep", "least", "most"), [(FLAT, 64, 64), (CostCurve((1, 320, 321, 1025), (2.0, 2.0, 2.02, 16.1)), 257, 320)]
)
def test_trees_fill_a_sweep_up_to_its_knee(sweep: CostCurve, least: int, most: int) -> None:
    """Up to the knee rows take as long as one; each further one takes a hundredth of that, and is worth less."""
    rounds = MadeRounds(sweep=sweep).play(40)
    assert all(least <= played.num_nodes <= most for played in rounds[10:])


def test_padding_is_filled() -> None:
    """Rows come in sixteens: sizes are whole sixteens, as far as there are guesses to fill them."""
    rounds = MadeRounds(sweep=CostCurve((16, 256), (1.0, 5.0), step=16)).play(40)
    assert {played.num_nodes % 16 for played in rounds[5:]} == {0}


@pytest.mark.slow
def test_if_every_row_costs_trees_are_small_and_no_fixed_size_is_clearly_faster() -> None:
    """The same texts at every size; 4 nodes are found from the prior's 6. Each fixed size has depths to choose from."""
    ours = seconds_per_token(MadeRounds(sweep=STEEP).play(400))
    sizes = [BestFirst(nodes, max(1, nodes // 2), depth) for nodes in (2, 4, 8, 16) for depth in (1, 2, 3, 5)]
    fixed = {size: seconds_per_token(MadeRounds(TreeSizer(size, 24, 1 << 20), STEEP).play(400)) for size in sizes}
    assert ours < 1.05 * min(fixed.values())
    assert ours < 0.8 * fixed[BestFirst(16, 8, 5)]


def test_an_overconfident_wrong_draft_is_given_up_within_four_rounds() -> None:
    """Each row costs, so each tree does. What is tried later is small and seldom."""
    rounds = MadeRounds(sweep=STEEP, claimed=SURE, true=WRONG).play(300)
    assert all(played.num_nodes == 1 for played in rounds[4:9])
    probes = [index for index, played in enumerate(rounds) if index >= 4 and played.num_nodes > 1]
    assert all(rounds[index].num_nodes <= PROBE.budget for index in probes)
    gaps = [after - before for before, after in pairwise(probes)]
    assert len(gaps) > 1
    assert gaps == sorted(gaps), "ever less often"
    assert len(probes) <= 6
    plain = seconds_per_token(MadeRounds(TreeSizer(BestFirst(1, 1, 1), 24, 64), STEEP).play(300))
    assert seconds_per_token(rounds) < 1.03 * plain


def test_a_draft_that_has_become_good_is_used_again() -> None:
    world = MadeRounds(sweep=STEEP, claimed=SURE, true=WRONG)
    assert world.play(40)[-1].decision.mode in (Mode.LOOKUP, Mode.PROBE)
    world.true = (0.95, 0.01)
    again = world.play(200)
    modes = [played.decision.mode for played in again]
    first = modes.index(Mode.DRAFT)
    assert first < 150, "probes come at most 64 rounds apart so early, and a few of them tell"
    assert set(modes[first:]) == {Mode.DRAFT}, "and for good"
    assert mean_nodes(again[-20:]) > 3


def test_a_draft_whose_steps_take_longer_than_sweeps_is_not_used() -> None:
    slow = CostCurve((1, 65), (1.5, 1.6))
    rounds = MadeRounds(step=slow).play(60)
    assert sum(played.plan.asks_draft for played in rounds[10:]) <= 4


def test_sizes_are_stable_under_noise() -> None:
    """Sweeps vary by 20 %, and a draft's tree is worth within 2 % of none: it is decided once or twice, not each time.

    A draft step takes so long that a tree of two nodes, right in 0.3 of rounds, gains about what it costs.
    """
    level = CostCurve((1, 1025), (1.0, 1.0 + 1e-6))
    world = MadeRounds(
        sweep=level, step=CostCurve((1, 65), (0.26, 0.28)), claimed=(0.3, 0.001), true=(0.3, 0.001), noise=0.2
    )
    drafts = [played.plan.asks_draft and played.decision.mode is Mode.DRAFT for played in world.play(300)]
    assert sum(before != after for before, after in pairwise(drafts)) <= 8


def test_noise_does_not_make_trees_grow() -> None:
    """Long sweeps are no reason for larger trees, or short ones for smaller: medians are used, not extremes."""
    quiet = mean_nodes(MadeRounds(sweep=STEEP).play(200)[50:])
    noisy = mean_nodes(MadeRounds(sweep=STEEP, noise=0.3).play(200)[50:])
    assert noisy == pytest.approx(quiet, rel=0.3)


def test_with_a_context_a_tree_gets_the_rows_left_before_the_knee() -> None:
    world = MadeRounds()
    world.play(20)
    assert [world.play(1, num_context=rows)[0].num_nodes for rows in (0, 20)] == [64, 44]
    assert 14 <= world.play(1, num_context=50)[0].num_nodes <= 24, "so few are each worth more than a row costs"


def test_with_other_sessions_a_tree_gets_the_rows_that_they_leave() -> None:
    """Three share 64 rows that cost nothing; the target divides further, so a little more than that is sent."""
    alone, beside = MadeRounds(), MadeRounds(other_rows=40, other_trees=2)
    shared = beside.base.target.__class__("target", "target", 1024, FLAT, num_running=3)
    rounds = beside.play(40, target=shared)
    assert all(played.proposal.may_leave_out for played in rounds)
    assert mean_nodes(rounds[10:]) < 0.6 * mean_nodes(alone.play(40)[10:])
    assert min(played.num_nodes for played in rounds[10:]) >= 64 // 3


def test_drafting_is_free_while_another_sweep_runs() -> None:
    """Calls wait for 0.6 of a sweep: a draft may take that long and loses nothing, so steps have no price.

    Alone, steps that take a third of a sweep do.
    """
    dear = CostCurve((1, 65), (0.3, 0.35))
    turns = MadeRounds(step=dear, queue=0.6, other_rows=30, other_trees=1)
    shared = turns.base.target.__class__("target", "target", 1024, FLAT, num_running=2)
    waited = turns.play(20, target=shared)[-1].plan.tree.growth
    assert isinstance(waited, BestFirst)
    assert (waited.min_gain, waited.seconds > 0.5) == (0.0, True)
    alone = MadeRounds(step=dear).play(20)[-1].plan.tree.growth
    assert isinstance(alone, BestFirst)
    assert alone.min_gain > 0.1
    assert alone.seconds == 0.0


def test_more_expensive_steps_make_shallower_trees() -> None:
    depths = [
        MadeRounds(step=STEP.scaled(factor)).play(60)[-1].drafted.depths().max() for factor in (0.1, 1.0, 5.0, 20.0)
    ]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[-1] + 2


def test_a_tree_of_two_nodes_is_grown_in_one_step_and_used_where_it_pays() -> None:
    """A second node costs 0.2 sweeps and is right for 0.35; a third is worth neither its row nor its step."""
    world = MadeRounds(
        sweep=CostCurve((1, 65), (1.0, 13.8)), step=CostCurve((1, 65), (0.033, 0.04)), claimed=WEAK, true=WEAK
    )
    rounds = world.play(200)[40:]
    drafted = [played.outcome.grown for played in rounds if played.outcome.grown is not None]
    assert len(drafted) > 0.9 * len(rounds)
    assert {played.num_nodes for played in rounds} <= {1, 2, 3}
    assert sum(grown.timings.num_passes for grown in drafted) < 1.2 * len(drafted)


def test_a_target_that_has_become_steep_is_followed_within_five_rounds() -> None:
    """Its next verdict has the new curve."""
    world = MadeRounds()
    assert mean_nodes(world.play(20)[10:]) == 64
    world.sweep = STEEP
    assert all(played.num_nodes <= 16 for played in world.play(10)[5:])


def test_better_guesses_make_larger_trees_if_rows_cost() -> None:
    sizes = [
        mean_nodes(MadeRounds(sweep=STEEP, claimed=q, true=q).play(200)[50:]) for q in ((0.3, 0.1), GOOD, (0.9, 0.05))
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_predicted_tokens_and_seconds_agree_with_the_measured_ones() -> None:
    """Over 600 rounds: seconds within 5 % where sweeps vary by 5 %; tokens within 5 %, of which chance makes 2 %."""
    world = MadeRounds(sweep=STEEP, noise=0.05, network=0.01)
    decisions = [played.decision for played in world.play(700)[100:]]
    tokens = sum(each.expected_tokens for each in decisions) / sum(each.tokens for each in decisions)
    seconds = sum(each.expected.total for each in decisions) / sum(each.seconds.total for each in decisions)
    assert tokens == pytest.approx(1.0, abs=0.05)
    assert seconds == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("sizer", [new_sizer(), TreeSizer(DEFAULT, 24, 64)])
def test_a_round_continues_if_its_session_was_forgotten_meanwhile(sizer: Sizer) -> None:
    """A stream that was taken over ends late, and has the session forgotten in the middle of the other's round."""
    here = situation()
    sizer.plan(here)
    sizer.forget(here.session_id)
    drafted = Tree.of([ROOT, 1, 2], [-1, 0, 1], [0.0, -0.1, -0.2])
    proposal = sizer.propose(here.session_id, drafted, Tree.root(ROOT))
    assert proposal.tree == drafted
    assert not proposal.may_leave_out
