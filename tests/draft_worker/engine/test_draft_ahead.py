"""Draft-ahead with a fake draft: what is found out between two calls saves steps and changes no tree."""

from __future__ import annotations

import numpy as np
import pytest

from bough.model.batch.batch import Batch
from bough.protocol.ids import ScopedId
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, Scheme, StaticShape, TreePlan
from draft_worker.engine.draft_ahead import NUM_STEPS, num_steps
from draft_worker.engine.engine import DraftEngine
from draft_worker.engine.session import Window
from tests.fakes.draft import (
    PLAN,
    VOCAB,
    FakeModel,
    fake_log_probs,
    grow_call,
    grow_now,
    grown_alone,
    new_engine,
    started,
)

LONG = 40
SHAPE = StaticShape((0, 0, 0, 1, 1, 2, 4, 6))
PLANS = {
    "best-first": PLAN,
    "shape": TreePlan(SHAPE),
    "chains": TreePlan(StaticShape.chains(2, 3)),
    "sampled shape": TreePlan(SHAPE, Scheme.WITHOUT_REPLACEMENT),
    "whole paths": TreePlan(SHAPE, Scheme.TRAVERSAL),
    "sampled chains": TreePlan(StaticShape.chains(3, 3), Scheme.WITHOUT_REPLACEMENT),
}


def go_ahead(engine: DraftEngine) -> None:
    """As far as it goes."""
    while engine.can_go_ahead:
        engine.step()


def likely_outcome(tokens: list[int], tree: Tree) -> list[int]:
    """Decoding with the draft itself until a token that is not in the tree."""
    children, node = tree.children(), 0
    while True:
        token = int(np.argmax(fake_log_probs(tokens)))
        tokens = [*tokens, token]
        if token not in children[node]:
            return tokens
        node = children[node][token]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("params", [SamplingParams(0.0), SamplingParams(0.8, seed=3)], ids=["greedy", "drawn"])
def test_a_likely_outcome_is_grown_before_the_call(plan: TreePlan, params: SamplingParams) -> None:
    """What is sampled is sampled beforehand with the random numbers of the round that will ask for it."""
    model = FakeModel()
    engine = new_engine(model, ahead_steps=LONG)
    tokens = [3, 1, 4]
    for _ in range(3):
        result = grow_now(engine, grow_call(tokens, sampling=params, plan=plan))
        go_ahead(engine)
        tokens = likely_outcome(tokens, result.tree)
        model.rows_run.clear()
        call = grow_call(tokens, sampling=params, plan=plan)
        result = grow_now(engine, call)
        assert result.tree == grown_alone(call).tree
        assert (result.timings.num_passes, model.rows_run) == (0, [])
        assert result.num_warm_nodes > 0
    assert engine.num_warm_trees >= 3


def test_draft_ahead_ends_after_its_steps_and_yields_to_calls() -> None:
    model = FakeModel()
    engine = new_engine(model, ahead_steps=6)
    grow_now(engine, grow_call([3, 1, 4], session_id="ahead"))
    engine.step()
    num_passes = len(model.rows_run)
    other = started(engine, grow_call([3, 1, 2], session_id="other"))
    for _ in range(4):
        engine.step()
    assert other.result(0).timings.num_passes == len(model.rows_run) - num_passes == 4
    engine.release(ScopedId("other"))
    go_ahead(engine)
    assert len(model.rows_run) == 4 + 6 + 4
    assert max(model.rows_run[4:]) <= 32


def test_a_call_with_other_parameters_uses_no_guesses_grown_ahead() -> None:
    engine = new_engine(FakeModel(), ahead_steps=LONG)
    result = grow_now(engine, grow_call([3, 1, 4]))
    go_ahead(engine)
    tokens = likely_outcome([3, 1, 4], result.tree)
    warmer = SamplingParams(0.9, seed=7)
    result = grow_now(engine, grow_call(tokens, sampling=warmer))
    assert result.num_warm_nodes == 0
    assert result.tree == grown_alone(grow_call(tokens, sampling=warmer)).tree


@pytest.mark.parametrize("plan", [TreePlan(StaticShape(())), TreePlan(BestFirst(1, 1, 1))])
def test_nothing_is_grown_ahead_for_plans_without_growth(plan: TreePlan) -> None:
    engine = new_engine(FakeModel(), ahead_steps=LONG)
    grow_now(engine, grow_call([3, 1, 4], plan=plan))
    assert not engine.can_go_ahead


def test_nothing_is_grown_ahead_below_the_end_of_the_text() -> None:
    """All but one token end the text, so that there is one path to follow and few outcomes."""
    closed = SamplingParams(0.0, stop_token_ids=frozenset(range(1, VOCAB)))
    model = FakeModel()
    engine = new_engine(model, ahead_steps=LONG)
    grow_now(engine, grow_call([3, 1, 0], sampling=closed))
    go_ahead(engine)
    assert sum(model.rows_run) < 20


def test_a_failure_ahead_only_costs_the_head_start(caplog: pytest.LogCaptureFixture) -> None:
    is_broken = []

    def fail(_: Batch) -> None:
        if is_broken:
            raise RuntimeError("no memory")

    engine = new_engine(FakeModel(fail), ahead_steps=LONG)
    result = grow_now(engine, grow_call([3, 1, 4]))
    is_broken.append(True)
    engine.step()
    assert not engine.can_go_ahead
    assert "draft-ahead failed" in caplog.text
    is_broken.clear()
    tokens = likely_outcome([3, 1, 4], result.tree)
    assert grow_now(engine, grow_call(tokens)).tree == grown_alone(grow_call(tokens)).tree


@pytest.mark.slow
def test_a_session_longer_than_the_drafts_context_continues_in_a_window() -> None:
    """The oldest tokens are dropped and half of the window is kept, so the rest is seldom run again."""
    model = FakeModel()
    engine = new_engine(model, window=Window(20, 40), ahead_steps=3)
    rng = np.random.default_rng(5)
    tokens, held, num_windows = [3, 1, 4], 0, 0
    while len(tokens) < 100:
        model.rows_run.clear()
        result = grow_now(engine, grow_call(tokens, held))
        num_windows += max(model.rows_run, default=0) > 12 + 3
        go_ahead(engine)
        held = result.held_length
        assert held == len(tokens) - 1
        seen = [tokens[begin:] for begin in range(len(tokens))]
        firsts = [int(np.argmax(fake_log_probs(part))) for part in seen if len(part) <= 20]
        assert int(result.tree.tokens[1]) in firsts
        path = result.tree.path(int(np.argmax(result.tree.depths())))[1 : 1 + int(rng.integers(0, 4))]
        tokens = [*tokens, *(int(result.tree.tokens[node]) for node in path), int(rng.integers(0, VOCAB))]
    assert num_windows <= 12
    assert grow_now(engine, grow_call(tokens[:5], 3)).tree == grown_alone(grow_call(tokens[:5])).tree


def test_a_prompt_longer_than_the_drafts_context_starts_at_the_window() -> None:
    model = FakeModel()
    engine = new_engine(model, window=Window(20, 40))
    tokens = [3, 1, 4, 1, 5, 2] * 10
    tree = grow_now(engine, grow_call(tokens)).tree
    assert tree == grown_alone(grow_call(tokens[-11:])).tree
    assert model.rows_run[0] == 11


@pytest.mark.slow
def test_a_tree_stays_within_the_drafts_positions() -> None:
    highest = []

    def record(batch: Batch) -> None:
        highest.append(int(batch.position_ids.max()))

    engine = new_engine(FakeModel(record), window=Window(30, 30), ahead_steps=LONG)
    for length in range(20, 45):
        grow_now(engine, grow_call(([3, 1, 4] * 20)[:length]))
        go_ahead(engine)
    assert max(highest) < 30


def test_expansions_survive_calls_whose_plan_could_fill_the_session() -> None:
    """Few trees expand as many nodes as they may."""
    engine, tokens = new_engine(FakeModel(), window=Window(100, 200, max_expansions=64), ahead_steps=LONG), [3, 1, 4]
    plan = TreePlan(BestFirst(12, 8, 8))
    for number in range(4):
        result = grow_now(engine, grow_call(tokens, plan=plan))
        assert result.tree == grown_alone(grow_call(tokens, plan=plan)).tree
        assert (result.num_warm_nodes > 0) == (number > 0)
        go_ahead(engine)
        tokens = [*tokens, int(result.tree.tokens[1])]


def test_draft_ahead_is_automatic_on_a_gpu_only() -> None:
    cpu, gpu = "cpu", "cuda"
    assert [num_steps(-1, cpu), num_steps(-1, gpu), num_steps(0, gpu), num_steps(5, cpu)] == [0, NUM_STEPS, 0, 5]
