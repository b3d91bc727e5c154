"""Every limit on a tree passes through the sizer, with sizes that it chooses and with fixed ones."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import pytest

from bough.errors import InvalidRequest
from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import Mode
from bough.protocol.generation import Speculation
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Timings
from bough.trees.tree import DraftProbs, Tree
from bough.trees.tree_plan import (
    MAX_EXPANSIONS,
    NO_TREE,
    BestFirst,
    Growth,
    Scheme,
    StaticShape,
    TreePlan,
    require_growth,
)
from orchestrator.sizing.plans import MIN_SHARE, Proposal, RoundPlan, WorkerFacts, limited
from orchestrator.sizing.tree_sizer import MOST_NODES, UNKNOWN, TreeSizer
from tests.fakes.made_rounds import FLAT, ROOT, STEEP, STEP, MadeRounds, new_sizer, situation

SHAPE = StaticShape((0, 0, 0, 1, 1, 2, 4))


@pytest.mark.parametrize(
    ("speculation", "growth"),
    [
        (Speculation(budget=40), BestFirst(40, 16, 7)),
        (Speculation(budget=6), BestFirst(6, 4, 6)),  # a level has a node at least
        (Speculation(budget=40, width=3), BestFirst(40, 3, 7)),
        (Speculation(budget=40, depth=2), BestFirst(40, 16, 2)),
        (Speculation(budget=9, width=2, depth=3), BestFirst(9, 2, 3)),
        (Speculation(growth=SHAPE), SHAPE),
        (Speculation(growth=StaticShape.chains(2, 3)), StaticShape.chains(2, 3)),
        (Speculation(growth=BestFirst(12, 2, 3, min_gain=0.25)), BestFirst(12, 2, 3, min_gain=0.25)),
    ],
)
def test_a_requested_size_is_used(speculation: Speculation, growth: Growth) -> None:
    """Whatever has been learnt, and with any sharers of the sweep, and without a price that would end growth sooner."""
    world = MadeRounds(sweep=STEEP)
    world.play(20)
    plan = world.sizer.plan(replace(world.base, speculation=speculation, num_context=300))
    assert plan.tree.growth == growth
    assert plan.max_nodes == growth.budget


def test_a_requested_width_or_depth_is_kept_while_the_size_is_chosen() -> None:
    world = MadeRounds()
    world.play(10)
    growth = world.sizer.plan(replace(world.base, speculation=Speculation(width=3, depth=2))).tree.growth
    assert isinstance(growth, BestFirst)
    assert (growth.width, growth.depth) == (3, 2)
    assert growth.budget > 4


def test_a_fixed_size_is_sent_completely_at_any_cost_of_rows() -> None:
    world = MadeRounds(sweep=STEEP)
    world.play(20)
    played = world.round(replace(world.base, speculation=Speculation(budget=40, width=8, depth=6)))
    assert played.num_nodes == 40
    assert not played.proposal.may_leave_out
    assert played.decision is not None
    assert played.decision.mode is Mode.FIXED


def test_a_scheme_reaches_the_draft() -> None:
    wanted = Speculation(growth=SHAPE, scheme=Scheme.TRAVERSAL)
    assert new_sizer().plan(situation(speculation=wanted)).tree.scheme is Scheme.TRAVERSAL


def sampled_tree() -> Tree:
    """Three children that were drawn, and what they were drawn from."""
    tokens, weights = np.array([1, 2, 3], np.int32), np.full(3, 1 / 3, np.float32)
    tree = Tree.of([ROOT, 1, 2, 3], [-1, 0, 0, 0], [0.0, *[math.log(1 / 3)] * 3])
    return replace(tree, draft_probs=DraftProbs.joined({0: (tokens, weights)}))


def test_samples_are_never_cut() -> None:
    """Its size may not depend on what was drawn. What was looked up comes behind it."""
    sizer, sample = new_sizer(), sampled_tree()
    wanted = Speculation(growth=StaticShape((0, 0, 0)), scheme=Scheme.WITHOUT_REPLACEMENT)
    sizer.plan(situation(speculation=wanted, target=WorkerFacts("target", "target", 1024, STEEP), lookup=4))
    alone = sizer.propose(ScopedId("s"), sample, Tree.root(ROOT))
    assert alone.tree == sample
    assert not alone.may_leave_out
    assert alone.places.tolist() == [0, 1, 2, 3]
    beside = sizer.propose(ScopedId("s"), sample, Tree.of([ROOT, 8, 9], [-1, 0, 1], [0.0, -0.1, -0.1]))
    assert beside.tree.tokens.tolist() == [ROOT, 1, 2, 3, 8, 9]
    assert beside.tree.draws is not None
    assert beside.tree.draws.tolist() == [1, 2, 3]
    assert not beside.may_leave_out


@pytest.mark.parametrize("num_remaining", [0, 1])
def test_nothing_is_guessed_at_the_last_token(num_remaining: int) -> None:
    world = MadeRounds()
    world.play(5)
    plan = world.sizer.plan(replace(world.base, num_remaining=num_remaining, lookup=8))
    assert (plan.tree, plan.max_nodes, plan.lookup) == (NO_TREE, 1, 0)


@pytest.mark.parametrize("num_remaining", [2, 3, 9])
def test_trees_are_no_deeper_than_the_remaining_tokens(num_remaining: int) -> None:
    world = MadeRounds()
    world.play(5)
    for speculation in (Speculation(), Speculation(budget=64, depth=20), Speculation(growth=StaticShape.chains(2, 12))):
        plan = world.sizer.plan(replace(world.base, num_remaining=num_remaining, speculation=speculation))
        assert 1 <= plan.tree.growth.depth <= num_remaining - 1


def test_a_request_without_speculation_has_no_tree() -> None:
    world = MadeRounds()
    world.play(5)
    played = world.round(replace(world.base, speculation=Speculation(disabled=True), lookup=8))
    assert (played.plan.tree, played.plan.lookup, played.num_nodes) == (NO_TREE, 0, 1)
    assert played.decision is not None
    assert played.decision.mode is Mode.OFF


@pytest.mark.parametrize(
    "speculation", [Speculation(), Speculation(budget=900), Speculation(growth=StaticShape.chains(30, 30))]
)
@pytest.mark.parametrize(("of_target", "of_draft"), [(20, 1024), (1024, 20), (7, 5), (1, 8), (8, 1)])
def test_no_tree_has_more_nodes_than_both_workers_accept(
    speculation: Speculation, of_target: int, of_draft: int
) -> None:
    """Streaming weights takes long, so the largest possible trees would be best."""
    wide = CostCurve((1, 1025), (10.0, 10.1))
    world = MadeRounds(sweep=wide)
    world.play(5)
    facts = replace(
        world.base,
        speculation=speculation,
        target=WorkerFacts("target", "target", of_target, wide),
        draft=WorkerFacts("draft", "draft", of_draft, STEP),
    )
    plan = world.sizer.plan(facts)
    assert plan.tree.growth.budget <= min(of_target, of_draft)
    assert plan.max_nodes <= of_target
    assert plan.asks_draft == (min(of_target, of_draft) > 1)


def test_a_draft_expands_no_more_nodes_than_reserved() -> None:
    plan = limited(TreePlan(BestFirst(1024, 512, 24)), situation())
    assert plan.tree.growth == BestFirst(1024, 512, MAX_EXPANSIONS // 512)
    world = MadeRounds(sweep=CostCurve((1, 1025), (100.0, 100.1)), step=STEP.scaled(0.01))
    for played in world.play(20):
        assert played.plan.tree.growth.max_expansions <= MAX_EXPANSIONS
        assert played.plan.tree.growth.budget <= MOST_NODES


def test_trees_are_moderate_before_a_targets_sweep_times_are_known() -> None:
    """A target sends its curve with each verdict, so that the second round knows it."""
    world = MadeRounds()
    unknown = situation(target=WorkerFacts("target", "target", 1024, None))
    played = world.round(unknown)
    assert played.plan.tree.growth == UNKNOWN
    assert played.num_nodes <= UNKNOWN.budget
    assert not played.proposal.may_leave_out, "nothing was decided"
    assert world.round(unknown).num_nodes == 64


def test_without_a_draft_guesses_come_from_prompt_lookup() -> None:
    sizer = new_sizer()
    plan = sizer.plan(situation(draft=None, lookup=12, target=WorkerFacts("target", "target", 1024, FLAT)))
    assert (plan.tree, plan.asks_draft, plan.lookup) == (NO_TREE, False, 12)
    guesses = Tree.of([ROOT, 1, 2, 3], [-1, 0, 1, 2], [0.0, -0.1, -0.1, -0.1])
    assert len(sizer.propose(ScopedId("s"), Tree.root(ROOT), guesses).tree) == 4


def test_looked_up_guesses_are_cut_if_they_are_not_worth_their_rows() -> None:
    sizer = new_sizer()
    sizer.plan(situation(draft=None, lookup=12, target=WorkerFacts("target", "target", 1024, STEEP)))
    guesses = Tree.of([ROOT, 1, 2, 3], [-1, 0, 0, 0], [0.0, math.log(0.9), math.log(0.04), math.log(0.03)])
    proposal = sizer.propose(ScopedId("s"), Tree.root(ROOT), guesses)
    assert proposal.tree.tokens.tolist() == [ROOT, 1]
    assert proposal.may_leave_out


def test_sent_nodes_are_a_part_of_the_grown_tree_with_parents_first() -> None:
    world = MadeRounds(sweep=STEEP)
    world.play(10)
    for played in world.play(10):
        tree, places = played.proposal.tree, played.proposal.places
        tree.validate(1000, 1024)
        assert len(places) == len(played.drafted)
        for node, place in enumerate(places):
            if place >= 0:
                assert tree.tokens[place] == played.drafted.tokens[node]
                if node:
                    assert tree.parents[place] == places[played.drafted.parents[node]]
        assert (places >= 0).sum() == len(tree)


@pytest.mark.parametrize(
    "bad",
    [
        CostCurve((1, 64), (1.0, math.nan)),
        CostCurve((1, 64), (1.0, 0.5)),
        CostCurve((1, 64), (1.0, math.inf)),
        CostCurve((64, 1), (1.0, 1.0)),
        CostCurve((), ()),
        CostCurve((1, 64), (-1.0, 1.0)),
        CostCurve((1, 2), (1.0,)),
        CostCurve((0,), (1.0,)),
        CostCurve((1,), (1.0,), 0),
    ],
    ids=["nan", "decreasing", "infinite", "rows that fall", "empty", "negative", "lengths", "no rows", "no step"],
)
def test_an_invalid_curve_is_ignored_with_one_warning_and_requests_continue(
    bad: CostCurve, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a target whose info is valid and whose verdicts are not: what was known before remains valid."""
    sound = MadeRounds().play(10)
    caplog.clear()
    world = MadeRounds()
    world.round(world.base)
    with caplog.at_level(logging.WARNING):
        played = [told_wrong(world, bad) for _ in range(9)]
    assert [len(proposal.tree) for proposal in played] == [each.num_nodes for each in sound[1:]]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1, "one for a worker, not one a round"
    assert all(text.startswith("target: cost") and "continuing with what was known before" in text for text in warnings)
    world.sweep = STEEP
    assert world.play(5)[-1].num_nodes <= 16, "a valid curve is taken again"


def told_wrong(world: MadeRounds, bad: CostCurve) -> Proposal:
    """A round whose verdict comes with such a curve."""
    plan = world.sizer.plan(world.base)
    grown = world.grown(plan.tree)
    proposal = world.sizer.propose(ScopedId("s"), grown.tree, Tree.root(ROOT))
    outcome = world.outcome(world.base, proposal, grown)
    world.sizer.observe(ScopedId("s"), replace(outcome, result=replace(outcome.result, cost=bad)))
    return proposal


@pytest.mark.parametrize("expected", [math.nan, math.inf, -1.0, 0.5, 0.0])
def test_a_number_of_experts_that_cannot_be_is_not_shown(expected: float) -> None:
    decisions = []
    for ratio in (2.5, expected):
        world = MadeRounds()
        plan = world.sizer.plan(world.base)
        grown = world.grown(plan.tree)
        proposal = world.sizer.propose(ScopedId("s"), grown.tree, Tree.root(ROOT))
        outcome = world.outcome(world.base, proposal, grown)
        timings = Timings(num_passes=1, num_experts=90, row_experts=40)
        result = replace(outcome.result, timings=timings, expected_expert_ratio=ratio)
        decisions.append(world.sizer.observe(ScopedId("s"), replace(outcome, result=result)))
    shown = [(each.expected_expert_ratio, each.expert_ratio) for each in decisions if each is not None]
    assert shown == [(2.5, 2.25), (0.0, 0.0)]


def test_a_new_worker_with_an_invalid_curve_has_no_predictions() -> None:
    sizer = new_sizer()
    bad = CostCurve((1, 64), (2.0, 1.0))
    plan = sizer.plan(situation(target=WorkerFacts("t", "t", 1024, bad), draft=WorkerFacts("d", "d", 1024, bad)))
    assert plan.tree.growth == UNKNOWN


@pytest.mark.parametrize("field", ["min_gain", "seconds"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5])
def test_prices_that_are_not_numbers_are_refused_by_name(field: str, value: float) -> None:
    growth = BestFirst(16, 4, 4)._replace(**{field: value})
    with pytest.raises(InvalidRequest, match=rf"^growth\.{field}: must be 0 \(off\) or more, got {value}$"):
        require_growth("growth", growth, 64)


def test_every_planned_price_is_accepted_by_a_draft() -> None:
    """With hostile drafts, in which prices are high, and over all the rounds until they are given up."""
    for claimed, true in (((0.97, 0.01), (0.0, 0.0)), ((0.5, 0.2), (0.5, 0.2))):
        for played in MadeRounds(sweep=STEEP, claimed=claimed, true=true).play(60):
            require_growth("growth", played.plan.tree.growth, 1024)


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
def test_a_prompts_rows_reduce_the_tree(num_context: int, expected: int) -> None:
    assert budget(1, num_context=num_context) == expected
    assert budget(1, Speculation(budget=64), num_context) == 64


def test_a_requested_size_is_not_shared() -> None:
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
def test_growths_with_fewer_levels(growth: Growth, depth: int, expected: Growth) -> None:
    assert growth.limited(growth.budget, depth) == expected
    assert growth.limited(growth.budget, depth).depth <= depth


@pytest.mark.parametrize(("num_sharing", "width"), [(1, 16), (2, 16), (4, 8), (8, 4), (100, MIN_SHARE)])
def test_a_step_of_a_small_tree_expands_at_most_half_of_it(num_sharing: int, width: int) -> None:
    """Eight sessions' steps are then of half as many rows, and their trees the same."""
    growth = plan_of(num_sharing).tree.growth
    assert isinstance(growth, BestFirst)
    assert growth.width == width


def test_results_of_rounds_do_not_change_a_fixed_size() -> None:
    world = MadeRounds(new_fixed(), sweep=STEEP, claimed=(0.97, 0.01), true=(0.0, 0.0))
    rounds = world.play(30)
    assert {played.plan for played in rounds} == {rounds[0].plan}
    assert {played.plan.tree.growth for played in rounds} == {BestFirst(64, 16, 7)}


def test_the_best_nodes_of_two_trees_are_sent() -> None:
    sizer = new_fixed()
    sizer.plan(situation(speculation=Speculation(budget=3), lookup=2))
    drafted = Tree.of([ROOT, 1, 2], [-1, 0, 0], np.log([1.0, 0.6, 0.1]).tolist())
    looked_up = Tree.of([ROOT, 3], [-1, 0], np.log([1.0, 0.5]).tolist())
    proposal = sizer.propose(ScopedId("s"), drafted, looked_up)
    assert proposal.tree.tokens.tolist() == [ROOT, 1, 3]
    assert not proposal.may_leave_out


def test_decisions_are_recorded_as_fixed_or_off_and_forgotten_sessions_start_again() -> None:
    world = MadeRounds(new_fixed())
    world.play(2)
    world.round(replace(world.base, speculation=Speculation(disabled=True)))
    decisions = world.log.of(ScopedId("s"))
    assert [(each.number, each.mode) for each in decisions] == [(1, Mode.FIXED), (2, Mode.FIXED), (3, Mode.OFF)]
    assert all(each.tokens >= 1 and each.seconds.sweep >= 1.0 for each in decisions)
    assert world.log.calibrations() == (), "it predicts nothing"
    world.sizer.forget(ScopedId("s"))
    assert world.play(1)[0].decision.number == 1
