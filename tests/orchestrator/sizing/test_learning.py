"""What a TreeSizer learns from and what it must not, what it keeps by whom, and that it keeps only so much."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bough.protocol.decision import Mode
from bough.protocol.generation import Speculation
from bough.protocol.ids import ScopedId
from bough.trees.tree import Tree
from bough.trees.tree_plan import StaticShape
from orchestrator.sizing.plans import WorkerFacts
from orchestrator.sizing.round_times import MAX_WORKERS
from orchestrator.sizing.totals import MAX_SESSIONS
from orchestrator.sizing.tree_sizer import MAX_PAIRS, TreeSizer
from tests.fakes.made_rounds import GOOD, ROOT, STEEP, STEP, WRONG, MadeRounds, mean_nodes, new_sizer, situation

SURE = (0.97, 0.01)


def values_of(sizer: TreeSizer, name: str = "s") -> list[float]:
    """What a tree of a session would be worth now, node by node."""
    sizer.plan(situation(session_id=ScopedId(name), speculation=Speculation(budget=5, width=1, depth=4)))
    tree = Tree.of([ROOT, 1, 2, 3], [-1, 0, 1, 2], [0.0, -0.4, -0.4, -0.4])
    sizer.propose(ScopedId(name), tree, Tree.root(ROOT))
    pending = sizer._pending[ScopedId(name)]
    assert pending.values is not None
    return pending.values.tolist()


def test_rounds_without_a_drafted_tree_are_not_learnt_from() -> None:
    """Whether the draft fails or the request wants no tree: trees are then what they were before."""
    world = MadeRounds(sweep=STEEP)
    before_rounds = world.play(60)
    before = values_of(world.sizer)
    world.draft_fails = True
    failed = world.play(40)
    assert all(played.num_nodes == 1 and played.plan.asks_draft for played in failed)
    assert values_of(world.sizer) == before
    world.play(40, speculation=Speculation(disabled=True))
    assert values_of(world.sizer) == before
    world.draft_fails = False
    assert world.play(1)[0].num_nodes == before_rounds[-1].num_nodes


def test_nodes_that_the_target_left_out_count_as_missing_and_not_as_rejected() -> None:
    """The target has chosen no other child of the root; whether what is below the chosen one was right is not known."""
    tree = Tree.of([ROOT, 0, 0, 0], [-1, 0, 1, 2], [0.0, -0.2, -0.2, -0.2])
    fixed = Speculation(growth=StaticShape.chains(1, 3))
    always = (1.0, 0.0)
    worlds = [MadeRounds(claimed=always, true=(1.0,)) for _ in range(2)]
    for left_out, world in zip(((), (2, 3)), worlds, strict=True):
        for _ in range(30):
            world.round(replace(world.base, speculation=fixed), tree, left_out)
    whole, cut = (values_of(world.sizer) for world in worlds)
    assert cut[1] == pytest.approx(whole[1], abs=0.1), "children of the root were right both times"
    assert cut[2] > values_of(new_sizer())[2], "right where it was looked at: no reason to think less of what is below"
    assert whole[3] > 0.8


def test_guesses_that_are_never_right_get_a_lower_probability_separately_for_draft_and_lookup() -> None:
    """Their probabilities come from elsewhere and stay as they are."""
    sure = Tree.of([ROOT, 1, 2], [-1, 0, 1], [0.0, -0.2, -0.2])
    world = MadeRounds(true=(), draft_fails=True)
    expected = [expected_tokens(world, sure) for _ in range(12)]
    assert expected[0] == pytest.approx(1 + np.exp(-0.2) + np.exp(-0.4))
    assert expected == sorted(expected, reverse=True)
    assert expected[-1] < 1.2
    assert expected_tokens(world, sure, "other") < 1.2, "a new session begins with what others have taught"
    world.draft_fails = False
    drafted = world.round(world.base, sure).decision
    assert drafted is not None
    assert drafted.expected_tokens > 2.4, "the draft has not been wrong yet"


def expected_tokens(world: MadeRounds, looked_up: Tree, session_id: str = "s") -> float:
    """What a round with looked-up guesses was expected to come to."""
    decision = world.round(replace(world.base, lookup=2, session_id=session_id), looked_up=looked_up).decision
    assert decision is not None
    return decision.expected_tokens


def test_a_session_that_moves_to_other_models_starts_again_and_remembers_its_pair_when_it_returns() -> None:
    world = MadeRounds(sweep=STEEP, claimed=SURE, true=WRONG)
    assert world.play(30)[-1].decision.mode is Mode.LOOKUP
    other = WorkerFacts("other", "other model", 1024, STEEP)
    first = world.round(replace(world.base, target=other))
    assert first.decision is not None
    assert first.decision.mode is Mode.DRAFT, "of this pair nothing is known"
    assert first.decision.number == 31, "its rounds are counted on"
    back = world.round(world.base)
    assert back.decision is not None
    assert back.decision.mode is Mode.LOOKUP, "of that one it is"


def test_another_worker_of_the_same_models_inherits_what_was_learnt() -> None:
    world = MadeRounds(sweep=STEEP, claimed=SURE, true=WRONG)
    world.play(30)
    same = WorkerFacts("another worker", "target", 1024, STEEP)
    played = world.round(replace(world.base, target=same))
    assert played.decision is not None
    assert played.decision.mode is Mode.LOOKUP
    assert played.decision.number == 31


def test_a_round_without_a_draft_ends_nothing() -> None:
    """The last token of an answer needs none: its round was numbered 1, and what the session had taught was dropped."""
    world = MadeRounds(sweep=STEEP)
    before = world.play(30)[-1].decision
    last = world.round(replace(world.base, draft=None, num_remaining=1)).decision
    assert last is not None
    assert (last.number, last.mode) == (31, Mode.OFF)
    again = world.round(world.base).decision
    assert again is not None
    assert again.number == 32
    assert again.expected_tokens == pytest.approx(before.expected_tokens, abs=0.5), "what it has learnt is still known"


def test_guesses_at_another_temperature_are_learnt_separately() -> None:
    world = MadeRounds(sweep=STEEP, claimed=SURE, true=WRONG)
    world.play(30)
    played = world.round(replace(world.base, session_id="other", temperature=0.8))
    assert played.decision is not None
    assert played.decision.mode is Mode.DRAFT


def test_a_new_session_starts_with_what_others_have_learnt() -> None:
    world = MadeRounds(sweep=STEEP)
    learnt = mean_nodes(world.play(100)[50:])
    first = world.round(replace(world.base, session_id="new"))
    assert first.num_nodes == pytest.approx(learnt, abs=1)
    assert first.plan.tree.growth.budget < MadeRounds(sweep=STEEP).play(1)[0].plan.tree.growth.budget


def test_sessions_keep_their_own_acceptance() -> None:
    """One is guessed well and one badly, in turns; they share a pair, and keep stats of their own."""
    world = MadeRounds(sweep=STEEP)
    sizes: dict[str, list[int]] = {"easy": [], "hard": []}
    for _ in range(150):
        for name, true in (("easy", (0.95, 0.02)), ("hard", (0.1, 0.02))):
            world.true = true
            sizes[name].append(world.round(replace(world.base, session_id=ScopedId(name))).num_nodes)
    easy, hard = (sum(sizes[name][75:]) / 75 for name in ("easy", "hard"))
    assert easy > 1.5 * hard


@pytest.mark.slow
def test_memory_of_the_sizer_is_limited() -> None:
    """Many sessions, each at workers and of models of its own; a tenth of them are never ended."""
    sizer = new_sizer()
    world = MadeRounds(sizer, sweep=STEEP)
    for index in range(700):
        facts = replace(
            world.base,
            session_id=ScopedId(f"s{index}"),
            target=WorkerFacts(f"t{index}", f"target {index}", 64, STEEP),
            draft=WorkerFacts(f"d{index}", f"draft {index}", 64, STEP),
        )
        world.round(facts)
        if index % 10:
            sizer.forget(facts.session_id)
    assert sizer._pairs.cache_info().currsize == MAX_PAIRS
    assert sizer._times._targets.cache_info().currsize == MAX_WORKERS
    assert sizer._times._drafts.cache_info().currsize == MAX_WORKERS
    assert len(world.log._sessions) == MAX_SESSIONS
    assert len(world.log.calibrations()) <= MAX_SESSIONS
    assert len(sizer._sessions) == 70
    assert not sizer._pending


def test_a_round_planned_twice_or_ended_after_its_session_does_no_harm() -> None:
    """A round whose verifying fails is never observed; an answer may come when the request has gone."""
    world = MadeRounds()
    world.sizer.plan(world.base)
    played = world.play(1)[0]
    assert played.num_nodes > 1
    world.sizer.plan(world.base)
    world.sizer.propose(ScopedId("s"), played.drafted, Tree.root(ROOT))
    for name in ("s", "s", "never was"):
        world.sizer.forget(ScopedId(name))
    assert world.sizer.observe(ScopedId("s"), played.outcome) is None
    assert len(world.log.of(ScopedId("s"))) == 1


def test_decisions_contain_plan_prediction_and_result() -> None:
    world = MadeRounds(sweep=STEEP, network=0.02)
    played = world.play(60)[-1]
    decision = played.decision
    assert decision is not None
    assert (decision.number, decision.mode, decision.draft_id) == (60, Mode.DRAFT, "draft")
    assert decision.num_sent == played.num_nodes == decision.num_rows
    assert decision.num_grown == len(played.drafted)
    assert decision.num_steps == played.outcome.grown.timings.num_passes if played.outcome.grown else False
    assert decision.tokens == len(played.outcome.tokens)
    assert decision.draft_rate > decision.plain_rate > 0
    assert decision.price >= decision.plain_rate
    assert decision.seconds.total == pytest.approx(played.outcome.timings.total_ns / 1e9)
    assert decision.expected.sweep == pytest.approx(STEEP(played.num_nodes), rel=0.01)
    assert decision.expected.network == pytest.approx(0.04, rel=0.01)
    assert decision.expected.total == pytest.approx(decision.seconds.total, rel=0.3)
    (calibration,) = world.log.calibrations()
    assert calibration.draft_id == "draft"
    assert calibration.expected_tokens == pytest.approx(calibration.realised_tokens, rel=0.2)
    assert calibration.expected_seconds == pytest.approx(calibration.realised_seconds, rel=0.1)


def test_a_first_tree_is_sized_for_a_good_draft() -> None:
    """The first tree of a pair of which nothing is known is as large as one that is guessed well."""
    assert MadeRounds(claimed=GOOD).play(1)[0].num_nodes == 64
