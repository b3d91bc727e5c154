"""Sessions of a draft engine grow what fresh ones would, over rounds, rollbacks and callers that leave."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidRequest, NotFound, PrefixMissing, StaleEpoch, Unavailable
from bough.model.batch.batch import Batch
from bough.model.sampling.sampler import draw
from bough.protocol.ids import ScopedId
from bough.protocol.prefix_hash import common_length
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import Tree
from bough.trees.tree_plan import MAX_EXPANSIONS, BestFirst, Growth, Guess, Scheme, StaticShape, TreePlan
from draft_worker.engine.engine import DraftEngine
from draft_worker.engine.session import Window
from tests.fakes.draft import VOCAB, FakeModel, fake_log_probs, grow_call, grow_now, grown_alone, new_engine, started
from tests.fakes.tiers import long_but

GROWTHS: tuple[Growth, ...] = (BestFirst(12, 3, 4), StaticShape((0, 0, 1, 1, 2)), StaticShape.chains(2, 3))


def test_a_session_over_many_rounds_grows_the_trees_of_a_new_one() -> None:
    """Follows an accepted path, then a token outside the tree, then a rollback by the orchestrator."""
    model = FakeModel()
    engine = new_engine(model)
    tokens = [3, 1, 4]
    tree = grow_now(engine, grow_call(tokens)).tree
    for take in (2, 1, 0, 3):
        nodes = tree.path(int(np.argmax(tree.depths())))[1 : 1 + take]
        held = len(tokens) - 1
        tokens = [*tokens, *(int(tree.tokens[node]) for node in nodes), 5]
        model.rows_run.clear()
        tree = grow_now(engine, grow_call(tokens, held)).tree
        assert tree == grown_alone(grow_call(tokens)).tree
        assert model.rows_run[0] <= 3, "what was grown and accepted is not run again"
    tokens = [*tokens[:4], 2]
    assert grow_now(engine, grow_call(tokens, 2)).tree == grown_alone(grow_call(tokens)).tree


def test_a_tree_comes_with_the_times_of_draft_steps_that_read_no_context() -> None:
    engine = new_engine(FakeModel())
    first = grow_now(engine, grow_call([3, 1, 4, 1, 5], plan=TreePlan(BestFirst(4, 3, 1))))
    assert first.cost is None, "its one step read the context too"
    second = grow_now(engine, grow_call([3, 1, 4, 1, 5, 2, 2]))
    third = grow_now(engine, grow_call([3, 1, 4, 1, 5, 2, 2, 2]))
    assert third.cost is not None
    third.cost.validate("cost")
    assert engine.cost is not None
    assert second.timings.num_passes > 1


@pytest.mark.parametrize("held", [0, 2])
def test_repeated_text_is_not_computed_again(held: int) -> None:
    """An orchestrator whose draft call timed out sends all tokens once more, or none."""
    model = FakeModel()
    engine = new_engine(model)
    first = grow_now(engine, grow_call([3, 1, 4])).tree
    model.rows_run.clear()
    again = grow_now(engine, grow_call([3, 1, 4], held))
    assert (again.tree, again.timings.num_passes, model.rows_run) == (first, 0, [])


@pytest.mark.parametrize("num_steps", range(4))
def test_a_tree_that_takes_too_long_is_returned_as_grown_so_far(
    monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    """A draft step takes a second of this clock; what was found out stays for the next call."""
    clock = [0]
    monkeypatch.setattr("draft_worker.engine.job.time.perf_counter_ns", lambda: clock[0])

    def tick(_: Batch) -> None:
        clock[0] += 10**9

    model = FakeModel(tick)
    engine, whole = new_engine(model), grown_alone(grow_call([3, 1, 4])).tree
    plan = TreePlan(BestFirst(60, 3, 4, seconds=num_steps - 0.5 if num_steps else 1e-9))
    clock[0] = 1
    grown = grow_now(engine, grow_call([3, 1, 4], plan=plan))
    assert grown.timings.num_passes == num_steps
    assert grown.tree.depths().max() == num_steps
    monkeypatch.undo()
    assert grow_now(engine, grow_call([3, 1, 4])).tree == whole


def test_a_tree_that_might_expand_more_nodes_than_there_are_rows_has_fewer_levels() -> None:
    """They were refused, and a request that asked for 200 levels had no guesses at all."""
    deep, narrow = TreePlan(BestFirst(40, 30, 200)), TreePlan(BestFirst(8, 300, 20))
    assert (
        grown_alone(grow_call([3, 1, 4], plan=deep)).tree
        == grown_alone(grow_call([3, 1, 4], plan=TreePlan(BestFirst(40, 30, MAX_EXPANSIONS // 30)))).tree
    )
    assert len(grown_alone(grow_call([3, 1, 4], plan=narrow)).tree) == 8


def test_a_wrong_assumption_about_the_session_is_refused_with_its_state() -> None:
    engine = new_engine(FakeModel())
    grow_now(engine, grow_call([3, 1, 4]))
    with pytest.raises(PrefixMissing) as caught:
        grow_now(engine, grow_call([3, 1, 4, 1, 5, 2], 5))
    assert caught.value.held_length == 2
    with pytest.raises(PrefixMissing):
        grow_now(engine, grow_call([3, 2, 4], 2))


def test_at_temperature_the_draft_guesses_the_sample_itself() -> None:
    """The draft's own model as the target: its first guess is the token that the target will draw."""
    for seed in range(40):
        params = SamplingParams(temperature=0.9, seed=seed)
        tokens = [3, 1, 4]
        tree = grown_alone(grow_call(tokens, sampling=params)).tree
        assert int(tree.tokens[1]) == draw(fake_log_probs(tokens).astype(np.float64), params, position=3)


def test_without_noise_the_draft_guesses_likely_tokens() -> None:
    tokens = [3, 1, 4]
    params = SamplingParams(temperature=2.0, top_k=3, seed=5)
    plan = TreePlan(BestFirst(4, 1, 1), guess=Guess.DISTRIBUTION)
    tree = grown_alone(grow_call(tokens, sampling=params, plan=plan)).tree
    best = np.argsort(-fake_log_probs(tokens))[:3]
    probs = np.exp(fake_log_probs(tokens)[best] / 2)
    assert tree.tokens[1:].tolist() == best.tolist()
    assert np.exp(tree.log_probs[1:]) == pytest.approx(probs / probs.sum(), abs=1e-5)


@pytest.mark.parametrize("guess", Guess)
def test_penalties_and_bias_apply_along_each_path(guess: Guess) -> None:
    """The first guess at every node is what decoding with the draft itself would draw there."""
    from bough.model.sampling.sampler import TokenCounts, adjusted

    params = SamplingParams(
        0.0, repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.4, logit_bias={2: 1.5, 0: -2.0}
    )
    tokens = [3, 1, 4, 1, 2]
    tree = grown_alone(grow_call(tokens, sampling=params, plan=TreePlan(StaticShape.chains(1, 6), guess=guess))).tree
    for _ in range(6):
        logits = adjusted(fake_log_probs(tokens).astype(np.float64), params, TokenCounts.of(tokens, 3))
        tokens = [*tokens, int(np.argmax(logits))]
    assert tree.tokens.tolist() == tokens[4:]


calls = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=12),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from(GROWTHS),
    st.sampled_from(Scheme),
    st.sampled_from(Guess),
)


@pytest.mark.slow
@given(st.lists(calls, min_size=1, max_size=6), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_sessions_in_one_batch_grow_the_trees_that_they_grow_alone(
    asked: list[tuple[list[int], float, Growth, Scheme, Guess]], steps_between: list[int]
) -> None:
    """Calls come in at any step of the others'."""
    engine = new_engine(FakeModel())
    futures = []
    for number, (tokens, temperature, growth, scheme, guess) in enumerate(asked):
        is_refused = isinstance(growth, BestFirst) and scheme is not Scheme.TARGET
        plan = TreePlan(growth, Scheme.TARGET if is_refused else scheme, guess)
        call = grow_call(tokens, 0, SamplingParams(temperature, seed=number), plan, f"session {number}")
        futures.append((call, started(engine, call)))
        for _ in range(steps_between[number]):
            engine.step()
    while engine.is_growing:
        engine.step()
    for call, future in futures:
        assert future.result(0).tree == grown_alone(call).tree


def test_sessions_share_draft_steps() -> None:
    model = FakeModel()
    engine = new_engine(model)
    for number in range(8):
        started(engine, grow_call([3, 1, number % VOCAB], session_id=str(number)))
    while engine.is_growing:
        engine.step()
    assert len(model.rows_run) == 4


def test_an_error_of_one_call_does_not_affect_others() -> None:
    """A model pass that fails is repeated for each session alone; a refusal does not reach the model at all."""

    def refuse_long_contexts(batch: Batch) -> None:
        if any(segment.base > 10 for segment in batch.segments):
            raise RuntimeError("no memory")

    engine = new_engine(FakeModel(refuse_long_contexts))
    good = started(engine, grow_call([3, 1, 4], session_id="good"))
    bad = started(engine, grow_call([3, 1, 4] * 5, session_id="bad"))
    refused = started(engine, grow_call([3, 1, 4], 2, session_id="refused"))
    shape = StaticShape(tuple(range(MAX_EXPANSIONS + 1)))
    huge = started(engine, grow_call([3, 1, 4], plan=TreePlan(shape), session_id="huge"))
    while engine.is_growing:
        engine.step()
    assert good.result(0).tree == grown_alone(grow_call([3, 1, 4])).tree
    with pytest.raises(RuntimeError, match="no memory"):
        bad.result(0)
    with pytest.raises(PrefixMissing):
        refused.result(0)
    with pytest.raises(
        InvalidRequest, match=f"growth: must expand at most {MAX_EXPANSIONS} nodes, got {MAX_EXPANSIONS + 1}"
    ):
        huge.result(0)
    assert grow_now(engine, grow_call([3, 1, 2], session_id="bad")).tree == grown_alone(grow_call([3, 1, 2])).tree


def test_a_new_call_of_a_growing_session_replaces_the_old_one() -> None:
    engine = new_engine(FakeModel())
    old = started(engine, grow_call([3, 1, 4]))
    engine.step()
    new = started(engine, grow_call([3, 1, 4, 1], 2))
    with pytest.raises(Unavailable, match="'s' was called again before its tree was grown"):
        old.result(0)
    while engine.is_growing:
        engine.step()
    assert new.result(0).tree == grown_alone(grow_call([3, 1, 4, 1])).tree


def test_a_session_can_be_released_while_it_grows() -> None:
    engine = new_engine(FakeModel())
    future = started(engine, grow_call([3, 1, 4]))
    engine.step()
    engine.release(ScopedId("s"))
    with pytest.raises(NotFound, match="'s' was released while its tree grew"):
        future.result(0)
    assert (engine.is_growing, len(engine.pool)) == (False, 0)
    with pytest.raises(NotFound, match="'s' has no slot here"):
        engine.release(ScopedId("s"))


def test_a_cancelled_call_costs_no_more_steps_and_its_results_are_kept() -> None:
    model = FakeModel()
    engine = new_engine(model)
    gone = started(engine, grow_call([3, 1, 4]))
    engine.step()
    assert gone.cancel()
    engine.step()
    assert len(model.rows_run) == 1
    assert not engine.is_growing
    result = grow_now(engine, grow_call([3, 1, 4], 2))
    assert result.tree == grown_alone(grow_call([3, 1, 4])).tree
    assert len(model.rows_run) == 4, "the first step is not run again"


def test_sessions_beyond_the_capacity_wait_and_evict_idle_ones() -> None:
    engine = new_engine(FakeModel(), num_rows=30)
    futures = [started(engine, grow_call([3, 1, n], session_id=str(n))) for n in range(5)]
    while engine.is_growing:
        engine.step()
        assert len(engine.pool) <= 2
    for n, future in enumerate(futures):
        assert future.result(0).tree == grown_alone(grow_call([3, 1, n])).tree
    with pytest.raises(PrefixMissing):
        grow_now(engine, grow_call([3, 1, 0, 1], 2, session_id="0"))


def test_a_long_context_is_computed_in_parts_between_others_steps() -> None:
    from draft_worker.engine.session import CONTEXT_CHUNK, Window

    model = FakeModel()
    engine = new_engine(model, window=Window(3000, 3000))
    long = [3, 1, 4, 2] * (CONTEXT_CHUNK // 2)
    future = started(engine, grow_call(long, session_id="long"))
    short = started(engine, grow_call([3, 1, 4], session_id="short"))
    while engine.is_growing:
        engine.step()
    assert max(model.rows_run) <= CONTEXT_CHUNK + 3 + 3
    assert short.result(0).tree == grown_alone(grow_call([3, 1, 4])).tree
    assert future.result(0).held_length == len(long) - 1
    assert future.result(0).tree.tokens[1] == np.argmax(fake_log_probs(long))


def test_a_release_of_an_older_epoch_is_ignored() -> None:
    """The session has gone on at another orchestrator, whose trees would start cold."""
    engine = new_engine(FakeModel())
    grow_now(engine, replace(grow_call([1, 2, 3], session_id="s"), epoch=7))
    with pytest.raises(StaleEpoch, match="epoch: must be at least 7, the session's, got 6"):
        engine.release(ScopedId("s"), 6)
    grow_now(engine, replace(grow_call([1, 2, 3], session_id="s"), epoch=5))
    with pytest.raises(StaleEpoch):
        engine.release(ScopedId("s"), 6)
    assert ScopedId("s") in engine.pool
    engine.release(ScopedId("s"), 7)
    assert ScopedId("s") not in engine.pool
    grow_now(engine, replace(grow_call([1, 2, 3], session_id="s"), epoch=7))
    engine.release(ScopedId("s"))
    assert ScopedId("s") not in engine.pool, "who says nothing of epochs always releases"
    with pytest.raises(NotFound):
        engine.release(ScopedId("s"), 1)


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
@pytest.mark.parametrize("ahead_steps", long_but([12], [0, 12]))
def test_a_repeated_answer_starts_again(plan: TreePlan, params: SamplingParams, ahead_steps: int) -> None:
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
def test_a_shorter_text_is_not_computed_again_and_uses_nothing_of_the_longer_one(length: int) -> None:
    """The root is the same token as the longer text's, for any truncation."""
    model = FakeModel()
    engine = new_engine(model, ahead_steps=12)
    grow_now(engine, grow_call([3] * 12))
    go_ahead(engine, 12)
    model.rows_run.clear()
    result = grow_now(engine, grow_call([3] * length, length - 1))
    assert result.tree == grown_alone(grow_call([3] * length)).tree
    assert (result.num_warm_nodes, model.rows_run[0]) == (0, 1)


def test_a_text_of_one_token_starts_again() -> None:
    engine = new_engine(FakeModel())
    grow_now(engine, grow_call([3, 1, 3]))
    assert grow_now(engine, grow_call([3])).tree == grown_alone(grow_call([3])).tree


def test_an_empty_window_starts_again() -> None:
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
    st.integers(0, 12),  # steps ahead
)
plans = st.one_of(
    st.builds(
        lambda width, guess: TreePlan(BestFirst(10, width, 3), guess=guess), st.integers(1, 5), st.sampled_from(Guess)
    ),
    st.sampled_from([*PLANS.values(), TreePlan(SHAPE, Scheme.TRAVERSAL)]),
)


@pytest.mark.slow
@given(
    st.lists(turns, min_size=2, max_size=8),
    plans,
    st.sampled_from((*PARAMS, SamplingParams(0.0, frequency_penalty=1.0))),
)
def test_a_truncated_text_grows_the_tree_of_a_new_session(
    asked: list[tuple[int, bool, int, int, int]], plan: TreePlan, params: SamplingParams
) -> None:
    """Also after any outcome of a round, explored ahead in part or not at all.

    The caller believes what an orchestrator does: what was held, as far as the text is the same.
    """
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
