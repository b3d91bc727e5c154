"""Rows of a sweep are divided among trees as well as any other way would, and no division changes a token."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.model.batch.batch import Batch
from bough.model.kv.session_kv import KVArena
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.cost_curve import CostCurve
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Timings, VerifyCall, VerifyResult
from bough.protocol.sampling_params import SamplingParams
from bough.sizing.sweep_times import SweepTimes
from bough.trees.tree import DraftProbs, Tree
from bough.trees.tree_plan import Scheme
from loadtest.common.tiny_model import TINY, save_model
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.engine import SweepEngine
from target_worker.scheduler.row_division import SweepTree, SweepYield, Yield, divide, may_leave_out
from target_worker.sweep.streamed_model import StreamedModel, StreamedSweeper
from tests.fakes.models import streamed
from tests.fakes.target import CPU, LIMITS, NO_GRAMMARS, Clock, FakeModel, new_pool, verify_call

SAMPLED = SamplingParams(temperature=0.9, seed=7)
DEAR = Timings(1_000_000_000, 0, 0, 1_000_000_000, 0, 0, 1, 0)  # a second for every sweep, all of it computing


class Gated:
    """Holds an engine's sweeps until calls have come that are to share the next one."""

    def __init__(self, model: FakeModel | StreamedModel, pool: SlotPool, limits: TargetLimits) -> None:
        self._sweep, self._began, self._gate = model.sweep, threading.Semaphore(0), threading.Event()
        self._gate.set()
        self.num_rows: list[int] = []
        model.sweep = self._gated
        self.engine = SweepEngine(StreamedSweeper(model, NO_GRAMMARS), pool, limits, 100)
        self._num_alone = 0

    def _gated(self, batch: Batch) -> tuple[torch.Tensor, Timings]:
        self.num_rows.append(batch.num_tokens)
        self._began.release()
        assert self._gate.wait(10)
        return self._sweep(batch)

    def together(self, calls: Sequence[VerifyCall]) -> list[Future[VerifyResult]]:
        """In one sweep, which comes after one of a session that ends with it."""
        while self._began.acquire(blocking=False):
            pass
        self._gate.clear()
        self._num_alone += 1
        name = f"alone {self._num_alone}"
        self.engine.verify(verify_call(name, [1], max_length=2))
        assert self._began.acquire(timeout=60)
        futures = [self.engine.verify(call) for call in calls]
        self._gate.set()
        for future in futures:
            future.exception(10)
        self.engine.release(ScopedId(name)).result(10)
        return futures


@contextmanager
def gated(model: FakeModel | StreamedModel, pool: SlotPool, limits: TargetLimits = LIMITS) -> Iterator[Gated]:
    """With its thread running."""
    gate = Gated(model, pool, limits)
    gate.engine.start()
    try:
        yield gate
    finally:
        gate._gate.set()
        gate.engine.stop()


def shareable(name: str, tokens: Sequence[int], held: int, round_: int, tree: Tree) -> VerifyCall:
    call = verify_call(name, tokens, held, round_, tree=tree, max_length=30)
    return replace(call, sampling=SAMPLED, may_leave_out=True)


def random_division(seed: int) -> Callable[..., list[np.ndarray]]:
    """Any closed sets with the root."""
    random = np.random.default_rng(seed)

    def divide(trees: Sequence[SweepTree], *_: object) -> list[np.ndarray]:
        kept = []
        for tree in trees:
            is_kept = (random.random(len(tree.values)) < 0.7) | ~np.bool_(tree.may_leave_out)
            is_kept[0] = True
            for node in range(1, len(is_kept)):
                is_kept[node] &= is_kept[tree.parents[node]]
            kept.append(np.flatnonzero(is_kept))
        return kept

    return divide


def likely_tree(random: np.random.Generator, text: Sequence[int], length: int, vocab_size: int) -> Tree:
    """A root at text[length - 1], nodes that follow the text for a while, and others."""
    nodes, parents, known = [text[length - 1]], [-1], {(-1, text[length - 1])}
    spine = 0
    for token in text[length : length + 4]:
        for guess, is_right in ((int(random.integers(vocab_size)), False), (token, True)):
            if (spine, guess) not in known:
                known.add((spine, guess))
                nodes.append(guess)
                parents.append(spine)
            if is_right:
                spine = next(n for n in range(len(nodes)) if (parents[n], nodes[n]) == (spine, guess))
    return Tree.of(nodes, parents, [0.0] + [-0.5] * (len(nodes) - 1))


def plain_text(engine: SweepEngine, name: str, prompt: list[int], num: int) -> list[int]:
    text = list(prompt)
    for round_ in range(num):
        held = len(text) - 1 if round_ else 0
        call = replace(verify_call(name, text, held, round_, max_length=40), sampling=SAMPLED)
        text.append(engine.verify(call).result(10).verdict.bonus_token)
    engine.release(ScopedId(name)).result(10)
    return text


def check_texts(gate: Gated, vocab_size: int, num: int = 16) -> int:
    """Two sessions side by side come to their plain texts; the number of nodes that were left out on the way."""
    engine, random = gate.engine, np.random.default_rng(3)
    prompts = {"a": [5, 6, 7], "b": [9, 2]}
    plain = {name: plain_text(engine, name, prompt, num) for name, prompt in prompts.items()}
    texts, held, num_left_out = {name: list(prompt) for name, prompt in prompts.items()}, dict.fromkeys(prompts, 0), 0
    for round_ in range(num):
        names = [name for name in texts if len(texts[name]) < len(plain[name])]
        if not names:
            break
        trees = {name: likely_tree(random, plain[name], len(texts[name]), vocab_size) for name in names}
        calls = [shareable(name, texts[name], held[name], round_, trees[name]) for name in names]
        for name, call, future in zip(names, calls, gate.together(calls), strict=True):
            result, tree = future.result(10), trees[name]
            left_out = set(result.left_out_nodes)
            assert list(result.left_out_nodes) == sorted(left_out)
            assert 0 not in left_out
            assert all(node in left_out for node in range(1, len(tree)) if int(tree.parents[node]) in left_out)
            assert not left_out & set(result.verdict.accepted_nodes)
            path = [0, *result.verdict.accepted_nodes]
            assert [int(tree.parents[node]) for node in path] == [-1, *path[:-1]], "numbers of the tree that was sent"
            assert engine.verify(call).result(10) == result, "who asks again is told the same"
            texts[name] += result.verdict.tokens_of(tree)
            held[name] = result.held_length
            num_left_out += len(left_out)
    for name, text in texts.items():
        assert text[: len(plain[name])] == plain[name]
    return num_left_out


@pytest.mark.parametrize("seed", range(3))
def test_any_division_of_rows_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr("target_worker.scheduler.row_division.divide", random_division(seed))
    with gated(FakeModel(), new_pool(Clock(), 8 * LIMITS.slot_rows)) as gate:
        assert check_texts(gate, 50) > 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny", TINY)


def test_any_division_of_rows_of_a_model_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    monkeypatch.setattr("target_worker.scheduler.row_division.divide", random_division(1))
    with streamed(tiny, torch.float32) as model:
        shape = model.skeleton.kv_shape()
        pool = SlotPool(KVArena(shape, shape.empty(8 * LIMITS.slot_rows, CPU)), 60.0, Clock())
        with gated(model, pool, replace(LIMITS, max_sweep_tokens=64)) as gate:
            assert check_texts(gate, 64) > 3


class DearTimes(SweepTimes):
    """Known beforehand, and not learnt."""

    def observe(self, *_: float) -> None:  # type: ignore[override]  # all figures of a sweep
        return None

    def curve(self) -> CostCurve:
        return CostCurve((1, 101), (0.1, 10.1))


def test_nodes_that_do_not_pay_are_left_out_of_shared_sweeps_if_allowed() -> None:
    """Every row takes a tenth of a second more here, and hopeless guesses win nothing in it."""
    hopeless = Tree.of([1, 9, 8, 7], [-1, 0, 0, 0], [0.0, -9.0, -10.0, -11.0])
    with gated(FakeModel(figures=DEAR), new_pool(Clock(), 8 * LIMITS.slot_rows)) as gate:
        gate.engine.verify(shareable("first", [1], 0, 0, Tree.root(1))).result(10)
        gate.engine._sweeps.times = DearTimes(1, 101)
        calls = [shareable(name, [1], 0, 0, hopeless) for name in ("a", "b")]
        calls.append(
            replace(calls[0], context=replace(calls[0].context, session_id=ScopedId("c")), may_leave_out=False)
        )
        results = [future.result() for future in gate.together(calls)]
        assert [result.left_out_nodes for result in results] == [(2, 3), (2, 3), ()]
        assert results[0].num_rows == 2 + 2 + 4
        alone = gate.engine.verify(shareable("d", [1], 0, 0, hopeless)).result(10)
        assert alone.left_out_nodes == (), "whoever is alone has decided already"
        (prompt, tree) = gate.together(
            [verify_call("p", list(range(10)), max_length=20), shareable("e", [1], 0, 0, hopeless)]
        )
        assert tree.result().left_out_nodes == (2, 3), "beside another's prompt"
        assert prompt.result().left_out_nodes == ()


def test_trees_that_do_not_fit_together_are_cut_without_waiting() -> None:
    chain = Tree.of(range(1, 9), range(-1, 7), [0.0] + [-0.1] * 7)
    with gated(FakeModel(), new_pool(Clock(), 8 * LIMITS.slot_rows)) as gate:
        gate.engine.verify(shareable("first", [1], 0, 0, Tree.root(1))).result(10)
        results = [f.result() for f in gate.together([shareable(name, [1], 0, 0, chain) for name in "abcd"])]
        assert sum(len(chain) - len(result.left_out_nodes) for result in results) == LIMITS.max_sweep_tokens
        assert {result.num_trees for result in results} == {4}
        assert max(gate.num_rows) <= LIMITS.max_sweep_tokens


def test_samples_are_never_cut() -> None:
    class Held:
        call = verify_call("a", [1])

    held = Held()
    assert not may_leave_out(held), "nobody has allowed it"
    held.call = replace(held.call, may_leave_out=True)
    assert may_leave_out(held)
    held.call = replace(held.call, scheme=Scheme.WITHOUT_REPLACEMENT)
    assert not may_leave_out(held)
    drawn = replace(Tree.root(1), draft_probs=DraftProbs.joined({}))
    held.call = replace(held.call, scheme=Scheme.TARGET, tree=drawn)
    assert not may_leave_out(held)


def test_the_price_of_a_second_is_what_all_sessions_get_in_it() -> None:
    sweeps = SweepYield()
    assert (sweeps.tokens_per_second, sweeps.recent) == (0.0, Yield(0.0, 0.0))
    now = 0.0

    def sweep(num_tokens: int, pause: float = 0.0) -> None:
        nonlocal now
        now += 2.0 + pause  # drafting included
        sweeps.answered(num_tokens, 2.0 * num_tokens)
        sweeps.answered(0, 0.0)
        sweeps.swept(1.0, now)

    for _ in range(10):
        sweep(6)
    assert sweeps.tokens_per_second == pytest.approx(3.0, rel=0.1)
    assert sweeps.recent.tokens_per_second == pytest.approx(2 * sweeps.tokens_per_second), "trees promise twice that"
    assert sweeps.recent.gap_seconds == pytest.approx(1.0, rel=0.15)
    before = sweeps.tokens_per_second
    sweep(6, pause=1000.0)
    assert sweeps.tokens_per_second > before, "nobody had anything to do meanwhile"
    for _ in range(20):
        sweep(2)
    assert 1.0 < sweeps.tokens_per_second < before, "half of what is known is from twenty sweeps ago"


FREE = CostCurve((1, 1000), (1.0, 1.0))


def random_rider(random: np.random.Generator, size: int, may_leave_out: bool = True) -> SweepTree:
    parents = np.array([-1, *(random.integers(0, node) for node in range(1, size))], np.int32)
    log_probs = np.where(parents < 0, 0.0, np.log(random.uniform(0.05, 1.0, size)))
    return SweepTree.of(Tree.of([0] * size, parents.tolist(), log_probs.tolist()), may_leave_out)


def is_closed(rider: SweepTree, nodes: np.ndarray) -> bool:
    return 0 in nodes and all(int(rider.parents[node]) in nodes for node in nodes if node)


def worth(riders: list[SweepTree], kept: list[np.ndarray], fixed: int, cost: CostCurve, price: float) -> float:
    gained = sum(rider.values[nodes].sum() for rider, nodes in zip(riders, kept, strict=True))
    return float(gained - price * cost(fixed + sum(map(len, kept))))


def every_way(rider: SweepTree) -> list[np.ndarray]:
    """All closed sets that keep the floor."""
    least = set(rider.least().tolist())
    nodes = range(len(rider.values))
    sets = (np.array(some) for num in range(1, len(nodes) + 1) for some in itertools.combinations(nodes, num))
    return [some for some in sets if least <= set(some.tolist()) and is_closed(rider, some)]


cases = st.tuples(
    st.integers(0, 10_000),
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3),
    st.integers(0, 9),
    st.floats(0.0, 5.0),
    st.sampled_from([1, 3, 4]),
)


@given(cases)
def test_no_other_division_is_worth_more(
    case: tuple[int, list[tuple[int, bool]], int, float, int],
) -> None:
    seed, sizes, fixed, price, step = case
    random = np.random.default_rng(seed)
    riders = [random_rider(random, size, may) for size, may in sizes]
    seconds = np.cumsum(random.exponential(0.3, 6)) + 0.1
    cost = CostCurve(tuple(range(step, 7 * step, step)), tuple(seconds.tolist()), step)
    least, most = fixed + sum(len(rider.least()) for rider in riders), int(random.integers(1, 30))
    kept = divide(riders, fixed, cost, Yield(price), most)
    num_rows = fixed + sum(map(len, kept))
    assert num_rows <= max(most, least)
    for rider, nodes in zip(riders, kept, strict=True):
        assert is_closed(rider, nodes)
        assert set(rider.least().tolist()) <= set(nodes.tolist())
        assert nodes.tolist() == sorted(nodes.tolist())
        assert rider.may_leave_out or len(nodes) == len(rider.values)
    ways = itertools.product(*(every_way(rider) for rider in riders))
    best = max(
        worth(riders, list(way), fixed, cost, price) for way in ways if fixed + sum(map(len, way)) <= max(most, least)
    )
    assert worth(riders, kept, fixed, cost, price) == pytest.approx(best)


def test_if_rows_are_free_nothing_is_left_out() -> None:
    riders = [random_rider(np.random.default_rng(seed), 40) for seed in range(3)]
    assert [len(nodes) for nodes in divide(riders, 100, FREE, Yield(50.0), 1000)] == [40, 40, 40]
    hopeless = SweepTree(np.array([1.0, 0.0, 0.0]), np.array([-1, 0, 0], np.int32))
    assert len(divide([hopeless], 0, FREE, Yield(50.0, 0.0), 1000)[0]) == 3, "though it is worth nothing either"


def test_the_gain_of_earlier_overlong_sweeps_does_not_make_this_one_too_long() -> None:
    """A target whose sweeps had been of all nodes once took twenty of them to find out that half would do better."""
    random = np.random.default_rng(0)
    riders = [random_rider(random, 64) for _ in range(8)]
    cost = CostCurve((1, 64, 640), (1.0, 1.0, 10.0))
    kept = divide(riders, 0, cost, Yield(0.0, 0.0), 1000)

    def rate(some: list[np.ndarray], gap: float) -> float:
        seconds = cost(sum(map(len, some))) + gap
        return sum(rider.values[nodes].sum() for rider, nodes in zip(riders, some, strict=True)) / seconds

    others = [divide(riders, 0, cost, Yield(price), 1000) for price in np.geomspace(0.1, 100, 60)]
    assert rate(kept, 0.0) >= max(rate(other, 0.0) for other in others) - 1e-9
    more = divide(riders, 0, cost, Yield(0.0, 5.0), 1000)
    assert rate(more, 5.0) >= max(rate(other, 5.0) for other in others) - 1e-9
    assert sum(map(len, more)) > sum(map(len, kept)), "what lies between sweeps is spread over more"
