"""A draft session called with less than it holds grows what a fresh one would: nothing found out is left over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.protocol.prefix_hash import common_length
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst, Scheme, StaticShape, TreePlan
from draft_worker.engine.engine import DraftEngine
from draft_worker.engine.session import Window
from tests.fakes.draft import VOCAB, FakeModel, grow_call, grow_now, grown_alone, new_engine

SHAPE, CHAINS = StaticShape((0, 0, 1, 1, 2)), StaticShape.chains(2, 3)
PLANS = {
    "best first": TreePlan(BestFirst(12, 3, 4)),
    "shape": TreePlan(SHAPE),
    "chains": TreePlan(CHAINS),
    "sampled shape": TreePlan(SHAPE, Scheme.WITHOUT_REPLACEMENT),
    "sampled chains": TreePlan(CHAINS, Scheme.WITHOUT_REPLACEMENT),
}
PARAMS = (
    SamplingParams(0.0),
    SamplingParams(0.8, seed=3),
    SamplingParams(0.8, seed=3, repetition_penalty=1.4, frequency_penalty=0.5),
)


def go_ahead(engine: DraftEngine, num_steps: int) -> None:
    """A few steps, where there is something to do ahead."""
    for _ in range(num_steps):
        engine.step()


def accepted(tokens: list[int], tree: Tree, take: int, bonus: int) -> list[int]:
    """The text after a verdict: part of the deepest path, and a token of the target's own."""
    nodes = tree.path(int(np.argmax(tree.depths())))[1 : 1 + take]
    return [*tokens, *(int(tree.tokens[node]) for node in nodes), bonus]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("params", PARAMS[1:], ids=("plain", "penalties"))
@pytest.mark.parametrize("ahead_steps", [0, 12])
def test_an_answer_asked_for_again_begins_anew(plan: TreePlan, params: SamplingParams, ahead_steps: int) -> None:
    """All of the prompt was held, so nothing had to be run, and what lay below the old answer was taken for its own."""
    engine = new_engine(FakeModel(), ahead_steps=ahead_steps)
    prompt = [3, 1, 4, 1, 5]
    for held_of_prompt in (0, len(prompt) - 1, len(prompt) - 1):
        tokens, held = prompt, held_of_prompt
        for take in (2, 0, 3, 1):
            result = grow_now(engine, grow_call(tokens, held, params, plan))
            assert result.tree == grown_alone(grow_call(tokens, 0, params, plan)).tree
            assert result.held_length == len(tokens) - 1
            assert engine.can_go_ahead == (ahead_steps > 0)
            go_ahead(engine, 5)
            tokens, held = accepted(tokens, result.tree, take, prompt[-1]), result.held_length


@pytest.mark.parametrize("length", range(2, 9))
def test_a_shorter_text_is_not_run_again_and_nothing_of_the_longer_is_taken_over(length: int) -> None:
    """The root is the same token as the longer text's, wherever the text is cut."""
    model = FakeModel()
    engine = new_engine(model, ahead_steps=12)
    grow_now(engine, grow_call([3] * 12))
    go_ahead(engine, 12)
    model.rows_run.clear()
    result = grow_now(engine, grow_call([3] * length, length - 1))
    assert result.tree == grown_alone(grow_call([3] * length)).tree
    assert (result.num_warm_nodes, model.rows_run[0]) == (0, 1)


def test_a_text_of_one_token_begins_anew() -> None:
    engine = new_engine(FakeModel())
    grow_now(engine, grow_call([3, 1, 3]))
    assert grow_now(engine, grow_call([3])).tree == grown_alone(grow_call([3])).tree


def test_a_window_that_keeps_nothing_begins_anew() -> None:
    """A tree as deep as the draft has positions leaves none to the text; a shallower one had been grown before."""
    window = Window(20, 5)
    engine, fresh = new_engine(FakeModel(), window=window), new_engine(FakeModel(), window=window)
    shallow, deep = TreePlan(BestFirst(12, 3, 1)), TreePlan(BestFirst(12, 3, 4))
    assert window.kept(4) == 0
    grow_now(engine, grow_call([3, 1, 4], plan=shallow))
    tree = grow_now(engine, grow_call([3, 1, 4], 2, plan=deep)).tree
    assert tree == grow_now(fresh, grow_call([3, 1, 4], plan=deep)).tree == grown_alone(grow_call([4], plan=deep)).tree


turns = st.tuples(
    st.integers(0, 12),  # leading tokens of the text that stay, where it is cut
    st.booleans(),  # whether it is
    st.integers(0, 4),  # accepted nodes, where it is not
    st.integers(0, VOCAB - 1),
    st.integers(0, 5),  # steps ahead
)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(turns, min_size=2, max_size=8), st.sampled_from([*PLANS.values()]), st.sampled_from(PARAMS))
def test_wherever_a_text_is_cut_the_tree_is_that_of_a_fresh_session(
    asked: list[tuple[int, bool, int, int, int]], plan: TreePlan, params: SamplingParams
) -> None:
    """The caller believes what an orchestrator does: what was held, as far as the text is the same."""
    engine = new_engine(FakeModel(), ahead_steps=12)
    tokens, held = [3, 1, 4], 0
    for length, is_cut, take, bonus, num_ahead in asked:
        result = grow_now(engine, grow_call(tokens, held, params, plan))
        assert result.tree == grown_alone(grow_call(tokens, 0, params, plan)).tree
        go_ahead(engine, num_ahead)
        new = [*tokens[:length], bonus] if is_cut else accepted(tokens, result.tree, take, bonus)
        held = min(result.held_length, common_length(tokens, new))
        tokens = new
    assert (
        grow_now(engine, grow_call(tokens, held, params, plan)).tree
        == grown_alone(grow_call(tokens, 0, params, plan)).tree
    )
