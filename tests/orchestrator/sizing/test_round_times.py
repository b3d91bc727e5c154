"""The expected seconds of a round, and what is known of each worker's seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import RoundSeconds, RoundTimings
from bough.protocol.messages import GrowResult, Timings, Verdict, VerifyResult
from bough.trees.tree import Tree
from orchestrator.sizing.pairs import RoundStats
from orchestrator.sizing.plans import RoundOutcome, Situation, WorkerFacts
from orchestrator.sizing.round_times import FIRST_STEPS, NUM_RECENT, RecentMedian, RoundTimes, WorkerTimes
from tests.fakes.made_rounds import ROOT, STEP, MadeRounds, situation

MS = 1_000_000
CURVE = CostCurve((1, 101), (1.0, 2.0))  # a hundredth of a second a row


def facts(num_running: int = 1, **changes: object) -> Situation:
    target = WorkerFacts("target", "target", 1024, CURVE, num_running)
    return situation(target=target, **changes)


def outcome(
    rows: int = 10, trees: int = 1, queue: int = 0, beside: int = 0, passes: int = 3, context: int = 0
) -> RoundOutcome:
    """A round with a tree of ten nodes; milliseconds. The draft took 30 a step, calls 5 each, the rest 2."""
    sweep = round(1000 * CURVE(rows)) + beside
    draft = 30 * passes
    grown = GrowResult(Tree.root(ROOT), 0, Timings(draft * MS, 0, compute_ns=draft * MS, num_passes=passes), 0, STEP)
    target_ns = (queue + sweep) * MS
    timings = RoundTimings((2 + draft + 10) * MS + target_ns, draft * MS, 10 * MS, target_ns, queue * MS)
    of_target = Timings(target_ns, queue * MS, compute_ns=round(1000 * CURVE(rows)) * MS, num_passes=1)
    result = VerifyResult(Verdict((), 7), 0, of_target, 0, (), CURVE, rows, trees)
    return RoundOutcome(10, [7], result, grown, 5 * MS, 5 * MS, timings)


def test_nothing_is_predicted_for_a_target_without_a_curve() -> None:
    times, unknown = RoundTimes(), situation(target=WorkerFacts("t", "t", 64, None))
    times.note(unknown)
    assert times.load(unknown) is None


def test_the_seconds_of_a_round_outside_its_sweep_are_learnt() -> None:
    times = RoundTimes()
    times.note(facts())
    for _ in range(8):
        times.observe(facts(), outcome(beside=40))
    load = times.load(facts(num_context=20))
    assert load is not None
    assert load.num_context == 20
    assert load.other_rows == 0
    assert load.num_trees == 1
    assert load.fixed_seconds == pytest.approx(0.005 + 0.040 + 0.002)
    parts = RoundSeconds()
    times.expect(parts, facts(), load, RoundStats(num_steps=3.0))
    assert parts.network == pytest.approx(0.010), "to the target and to the draft"
    assert parts.draft == pytest.approx(3 * 0.030, rel=1e-3)
    assert parts.queue == 0.0
    assert parts.other == pytest.approx(0.002)
    without = RoundSeconds()
    times.expect(without, facts(), load, None)
    assert (without.draft, without.network) == (0.0, pytest.approx(0.005))


def test_a_curves_error_does_not_count_as_time_outside_the_sweep() -> None:
    """Sweeps take twice what the target says: of that no tree would be smaller or larger for long."""
    times, made = RoundTimes(), outcome()
    sweep_ns = made.timings.target_ns
    slow = replace(
        made, timings=replace(made.timings, target_ns=2 * sweep_ns, total_ns=made.timings.total_ns + sweep_ns)
    )
    told = replace(made.result.timings, compute_ns=sweep_ns, wait_ns=sweep_ns)
    times.note(facts())
    for _ in range(8):
        times.observe(facts(), replace(slow, result=replace(made.result, timings=told)))
    load = times.load(facts())
    assert load is not None
    assert load.fixed_seconds == pytest.approx(0.005 + 0.002)


def test_draft_steps_are_predicted_by_recent_ones_without_prompts() -> None:
    times = RoundTimes()
    times.note(facts())
    first = times.draft_seconds(facts(), RoundStats())
    assert first == pytest.approx(FIRST_STEPS * STEP(1))
    for _ in range(8):
        times.observe(facts(num_draft_context=500), outcome())
    assert times.step_seconds(facts()) == pytest.approx(STEP(1))
    for _ in range(8):
        times.observe(facts(), outcome())
    assert times.step_seconds(facts()) == pytest.approx(0.030, rel=1e-3)
    assert times.draft_seconds(facts(), RoundStats(num_steps=5.0)) == pytest.approx(5 * 0.030 + 0.005, rel=1e-3)


def test_other_sessions_rows_and_tokens_count_while_they_run() -> None:
    times = RoundTimes()
    for _ in range(8):
        times.observe(facts(3), outcome(rows=50, trees=3))
    load = times.load(facts(3))
    assert load is not None
    assert load.other_rows == 40
    assert load.num_trees == 3
    alone = times.load(facts(1))
    assert alone is not None
    assert (alone.other_rows, alone.num_trees) == (0, 1)


def test_sessions_of_other_orchestrators_count_while_they_share_sweeps() -> None:
    """Each orchestrator knows of its own sessions only, and once took their target for its own."""
    times = RoundTimes()
    for _ in range(8):
        times.observe(facts(1), outcome(rows=50, trees=3, queue=400))
    load, parts = times.load(facts(1)), RoundSeconds()
    assert load is not None
    assert (load.other_rows, load.num_trees) == (40, 3)
    times.expect(parts, facts(1), load, None)
    assert parts.queue == pytest.approx(0.4)
    for _ in range(4):
        times.observe(facts(1), outcome(rows=10, trees=1))
    load = times.load(facts(1))
    assert load is not None
    assert (load.other_rows, load.num_trees) == (0, 1)


def test_rows_left_out_and_contexts_do_not_count_as_other_sessions() -> None:
    times = RoundTimes()
    for _ in range(8):
        made = outcome(rows=46, trees=2)  # 30 of another session; of 10 nodes 4 were left out, and 10 of context
        times.observe(facts(2, num_context=10), replace(made, result=replace(made.result, left_out_nodes=(6, 7, 8, 9))))
    load = times.load(facts(2))
    assert load is not None
    assert load.other_rows == 30


@pytest.mark.parametrize(("queue", "is_free"), [(0, False), (250, False), (400, True), (900, True)])
def test_drafting_is_free_for_a_session_that_waits_for_a_quarter_of_a_sweep(queue: int, is_free: bool) -> None:
    """Sessions take turns then. A sweep with the others' rows takes a second and a tenth."""
    times = RoundTimes()
    for _ in range(8):
        times.observe(facts(2), outcome(rows=20, trees=2, queue=queue))
    free = times.free_seconds(facts(2))
    assert (free > 0) == is_free
    assert (times.draft_seconds(facts(2), RoundStats(num_steps=3.0)) == 0.0) == is_free
    assert times.free_seconds(facts(1)) == 0.0, "alone nobody takes turns"
    if is_free:
        drafting = 0.090 + 0.005
        assert free == pytest.approx(drafting + 0.9 * (queue / 1000 - 0.25 * CURVE(11)), rel=0.01)


def test_a_verdict_of_several_sweeps_is_not_learnt_from() -> None:
    times = RoundTimes()
    made = outcome(rows=400, trees=9, beside=5000)
    several = replace(made, result=replace(made.result, timings=replace(made.result.timings, num_passes=3)))
    for _ in range(8):
        times.observe(facts(2), several)
    load = times.load(facts(2))
    assert load is not None
    assert (load.other_rows, load.num_trees) == (None, 1)
    assert load.expected_sweep(7) == CURVE(7), "nothing is known of others"
    assert load.fixed_seconds < 0.1


def test_prompts_read_together_are_not_expected_again() -> None:
    times = RoundTimes()
    times.observe(facts(16, num_context=300), outcome(rows=4000, trees=16, queue=900))
    load = times.load(facts(16))
    assert load is not None
    assert load.fixed_seconds < 0.1, "nor is what they waited"
    assert load.expected_sweep(5) == CURVE(16 * 5), "before a round without a prompt the others' trees are as one's own"
    times.observe(facts(16), outcome(rows=70, trees=16))
    load = times.load(facts(16))
    assert load is not None
    assert load.other_rows == 60


def test_a_change_of_the_network_is_followed_within_five_rounds() -> None:
    world = MadeRounds()
    world.play(20)
    world.network = 0.5
    world.play(4)
    assert world.play(1)[0].decision.expected.network == pytest.approx(1.0)


STEADY = CostCurve((1, 64), (1.0, 2.0))


def test_a_median_is_followed_after_four_samples_and_not_moved_by_one() -> None:
    recent = RecentMedian(0.25)
    assert recent.median == 0.25
    for _ in range(NUM_RECENT):
        recent.add(1.0)
    recent.add(1000.0)
    assert recent.median == 1.0
    for _ in range(NUM_RECENT // 2):
        recent.add(3.0)
    assert recent.median == 3.0


def test_a_reported_curve_is_used_until_the_next() -> None:
    times = WorkerTimes()
    times.update("w", STEADY)
    assert times.curve == STEADY
    times.update("w", None)
    assert times.curve == STEADY
    times.update("w", later := STEADY.scaled(2.0))
    assert times.curve == later


def test_a_draft_step_is_predicted_by_the_curve_and_recent_steps() -> None:
    times = WorkerTimes()
    assert times.step_seconds == 0.0
    times.update("d", STEADY)
    assert times.step_seconds == 1.0
    for _ in range(NUM_RECENT):
        times.ratio.add(1.5)
    assert times.step_seconds == 1.5
