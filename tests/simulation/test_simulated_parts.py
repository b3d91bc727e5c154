"""The parts below the engines of simulated workers, on a clock that only sleeping advances."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bough.errors import ConfigError, Exhausted, Unavailable
from bough.model.kv.arena import Arena
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.messages import Timings
from bough.protocol.sampling_params import SamplingParams
from bough.simulation.clock import Line, SimulatedClock
from bough.simulation.pair import SimulatedPair
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, Scheme, StaticShape, TreePlan
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.engine import SweepEngine
from target_worker.simulated import SimulatedSweeper
from tests.fakes.draft import grow_call
from tests.fakes.simulated import TurnedClock, grammars_of, pair_of, text_of
from tests.fakes.simulated_growth import grown, wide_tree
from tests.fakes.target import verify_call

LIMITS = TargetLimits(rows=1, max_sweep_tokens=64, max_nodes=32, max_context=256)
SEEDED = SamplingParams(temperature=0.8, seed=11)


@pytest.fixture
def pair(tmp_path: Path) -> SimulatedPair:
    return pair_of(tmp_path)


def swept_by(pair: SimulatedPair, clock: SimulatedClock, trees: list[Tree], context: int = 20) -> list[Timings]:
    """What the sweeps of one session after another are measured to take."""
    figures: list[Timings] = []
    pool = SlotPool(Arena(10_000, 1), 60.0, clock.now)
    engine = SweepEngine(
        SimulatedSweeper(pair, clock, grammars_of(pair)),
        pool,
        LIMITS,
        10,
        observe=lambda *told: figures.append(told[-1].timings),
    )
    engine.start()
    try:
        for number, tree in enumerate(trees):
            tokens = [number, *range(300, 300 + context - 1), int(tree.tokens[0])]
            engine.verify(verify_call(str(number), tokens, tree=tree)).result(10)
    finally:
        engine.stop()
    return figures


def chain(length: int) -> Tree:
    return Tree.of([300] * length, range(-1, length - 1), [0.0] + [-1.0] * (length - 1))


def test_a_sweep_takes_the_longer_of_link_and_products(pair: SimulatedPair) -> None:
    """20 tokens of context and a root are 21 rows: 0.31 s of products and 0.4 s of link; with 32 nodes, 0.62 s."""
    link_bound, row_bound = swept_by(pair, TurnedClock(), [chain(1), chain(32)])
    assert link_bound == Timings(4_000_000, 0, 900_000, 3_100_000, 4_000_000, 400_000_000, 1, 4_000_000)
    assert row_bound == Timings(6_200_000, 0, 0, 6_200_000, 4_000_000, 400_000_000, 1, 4_000_000)


def test_events_lengthen_sweeps_without_changing_the_links_best_time(tmp_path: Path) -> None:
    slower = pair_of(tmp_path, events=[{"at_second": 0.3, "link": 3}])
    figures = swept_by(slower, TurnedClock(), [chain(1), chain(2)])
    assert [own.total_ns for own in figures] == [4_000_000, 12_000_000]
    assert [own.link_ideal_ns for own in figures] == [4_000_000, 4_000_000]


def test_sweep_times_are_reported_before_the_first_sweep(pair: SimulatedPair) -> None:
    """In real seconds: a hundredth of the profile's, and the longer of the link's 4 ms and the products'."""
    engine = SweepEngine(
        SimulatedSweeper(pair, TurnedClock(), grammars_of(pair)),
        SlotPool(Arena(1000, 1), 60.0, lambda: 0.0),
        LIMITS,
        10,
    )
    engine.start()
    try:
        engine.warm_up().result(10)
        assert engine.cost is not None
        assert [engine.cost(rows) for rows in (1, 16, 64)] == pytest.approx([0.004, 0.004, 0.0074], rel=0.02)
    finally:
        engine.stop()


def test_jitter_is_repeatable(tmp_path: Path) -> None:
    target = {"link_seconds": 0.4, "compute_row_seconds": 0.01, "jitter": 0.2}
    first, second = (
        [own.total_ns for own in swept_by(pair_of(tmp_path, target=target), TurnedClock(), [chain(1)] * 5)]
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 5


def test_slots_without_keys_are_leased_and_forked_like_real_ones(pair: SimulatedPair) -> None:
    pool = SlotPool(Arena(2 * LIMITS.slot_rows, 1), 60.0, lambda: 0.0)
    engine = SweepEngine(SimulatedSweeper(pair, TurnedClock(), grammars_of(pair)), pool, LIMITS, 10)
    engine.start()
    text = [*range(300, 340)]
    try:
        computed = [engine.verify(verify_call(name, text)).result(10) for name in ("a", "b")]
        assert [result.cached_length for result in computed] == [0, 32], "whole blocks of what another holds"
        assert engine.verify(verify_call("a", text)).result(10) is computed[0]
        with pytest.raises(Exhausted):
            engine.verify(verify_call("c", [5] * 50, max_length=250)).result(10)
        pool.check_integrity()
    finally:
        engine.stop()


def best_first(depth: int = 4, budget: int = 12, width: int = 3) -> TreePlan:
    return TreePlan(BestFirst(budget, width, depth))


def test_a_step_serves_all_sessions_and_takes_the_seconds_of_all_rows(pair: SimulatedPair) -> None:
    """Both roots, and 12 and 8 tokens of context before them: 10 ms, 2 of rows and 20 of context."""
    clock = TurnedClock()
    plan = best_first(depth=1)
    calls = [
        grow_call([5] * 13, plan=plan, session_id="a"),
        grow_call([6] * 9, plan=plan, session_id="b", sampling=SEEDED),
    ]
    results = grown(pair, clock, calls)
    assert clock.now() == pytest.approx(0.010 + 0.002 + 0.020)
    assert [result.timings.num_passes for result in results] == [1, 1]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0, seed=5), SEEDED])
def test_a_drafts_guesses_are_right_as_often_as_the_profile_says(pair: SimulatedPair, sampling: SamplingParams) -> None:
    """Over 500 texts the first guess below a root is right in 0.6 of them: 5 standard deviations are 0.11."""
    seed = 0 if sampling.is_greedy else 11
    num_right, claims = 0, []
    for position in range(10, 510):
        call = grow_call([*range(300, 300 + position)], plan=best_first(depth=1, budget=2), sampling=sampling)
        (result,) = grown(pair, TurnedClock(), [call])
        num_right += int(result.tree.tokens[1]) == text_of(pair, seed, position, 1)[0]
        claims.append(np.exp(result.tree.log_probs[1]))
    assert num_right / 500 == pytest.approx(0.6, abs=0.11)
    assert np.mean(claims) == pytest.approx(0.6, abs=0.08)
    assert np.std(claims) > 0.1, "positions differ"


def test_a_tree_grows_below_right_and_wrong_nodes(pair: SimulatedPair) -> None:
    """A wrong path has guesses too, none of which is the text's: a verdict ends above it all the same."""
    call = grow_call([*range(300, 340)], plan=best_first(depth=5, budget=40, width=8), sampling=SEEDED)
    tree = grown(pair, TurnedClock(), [call])[0].tree
    text = text_of(pair, 11, 40, 6)
    depths = tree.depths()
    is_true = np.array([depths[i] == 0 or tree.tokens[i] == text[depths[i] - 1] for i in range(len(tree))])
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        path_is_true = all(is_true[own] for own in tree.path(parent))
        assert path_is_true or not is_true[node]
    assert depths.max() >= 2


@pytest.mark.parametrize(("min_gain", "least", "most"), [(0.0, 40, 40), (1.0, 2, 39), (50.0, 1, 1)])
def test_the_price_of_a_step_limits_a_simulated_tree(
    pair: SimulatedPair, min_gain: float, least: int, most: int
) -> None:
    plan = TreePlan(BestFirst(40, 8, 6, min_gain=min_gain))
    tree = grown(pair, TurnedClock(), [grow_call([*range(300, 340)], plan=plan, sampling=SEEDED)])[0].tree
    assert least <= len(tree) <= most


def test_samples_of_a_greedy_request_are_the_best_candidates_in_order(pair: SimulatedPair) -> None:
    plan = TreePlan(StaticShape.chains(3, 2), Scheme.WITHOUT_REPLACEMENT)
    tree = grown(pair, TurnedClock(), [grow_call([*range(300, 340)], plan=plan)])[0].tree
    best = grown(pair, TurnedClock(), [grow_call([*range(300, 340)], plan=TreePlan(StaticShape.chains(3, 2)))])[0].tree
    assert tree.tokens[1:4].tolist() == best.tokens[1:4].tolist()
    assert tree.draft_probs is not None


async def test_calls_fail_during_the_profiles_failures(tmp_path: Path) -> None:
    failures = [{"worker": "target", "at_second": 10, "for_seconds": 5}]
    clock = TurnedClock()
    line, other = (Line(kind, pair_of(tmp_path, failures=failures).profile, clock) for kind in ("target", "draft"))

    async def call(own: Line = line) -> str:
        async with own.crossed():
            return "answer"

    assert await call() == "answer"
    clock.turn(0.12)
    with pytest.raises(Unavailable, match=r"simulated failure of the target worker at second 12\.0 of its profile"):
        await call()
    assert await call(other) == "answer"
    clock.turn(0.03)
    assert await call() == "answer"


async def test_the_nth_calls_outcome_is_deterministic(tmp_path: Path) -> None:
    profile = pair_of(tmp_path, failures=[{"worker": "draft", "probability": 0.3}], network={}).profile

    async def run() -> list[bool]:
        line, fails = Line("draft", profile, TurnedClock()), []
        for _ in range(200):
            try:
                async with line.crossed():
                    fails.append(False)
            except Unavailable:
                fails.append(True)
        return fails

    first = await run()
    assert first == await run()
    assert 30 < sum(first) < 90


async def test_a_hanging_call_waits_for_the_end_of_the_failure(tmp_path: Path) -> None:
    hangs = [{"worker": "target", "kind": "hang", "for_seconds": 2}]
    clock = SimulatedClock(100.0)
    async with Line("target", pair_of(tmp_path, failures=hangs, network={}).profile, clock).crossed():
        assert clock.now() >= 1.9
    for_ever = Line("target", pair_of(tmp_path, failures=[{"worker": "target", "kind": "hang"}]).profile, TurnedClock())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), for_ever.crossed():
            raise AssertionError("it never answers")


def test_a_profile_whose_kv_holds_no_session_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes, for one session of 288 tokens, got"):
        LIMITS.num_rows(10, 2000)


def test_a_simulated_draft_loads_neither_numba_nor_torch(tmp_path: Path) -> None:
    """Its trees are those that any process grows."""
    command = [sys.executable, "-m", "tests.fakes.simulated_growth", str(tmp_path)]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    loaded, (tokens, parents, log_probs) = json.loads(ran.stdout)
    here = wide_tree(tmp_path)
    assert loaded == []
    assert len(tokens) > 20
    assert [tokens, parents, log_probs] == here
