"""What a slot holds is not computed again: for the same session, for others, and for calls that wait together; and
what follows is the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bough.model.batch.batch import Batch
from bough.model.kv.session_kv import KVArena
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Timings, VerifyCall, VerifyResult
from bough.protocol.sampling_params import SamplingParams
from bough.sizing.row_counts import RowCounts
from bough.trees.tree import Tree
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.engine import SweepEngine
from target_worker.sweep.streamed_model import StreamedModel, StreamedSweeper
from tests.fakes.models import streamed
from tests.fakes.target import CPU, NO_GRAMMARS, Clock, FakeModel, new_pool, verify_call

LIMITS = TargetLimits(rows=64, max_sweep_tokens=1024, max_nodes=32, max_context=1024)
LINK_BOUND = Timings(1_000_000_000, 0, 900_000_000, 100_000_000, 1_000_000_000, 1, 1, 1)
SYSTEM = [n % 47 for n in range(500)]
BLOCKS = 480  # tokens of whole blocks of it, which sessions share


def answers(engine: SweepEngine, calls: Sequence[VerifyCall]) -> list[VerifyResult]:
    """Of calls that all wait before the first sweep begins."""
    futures = [engine.verify(call) for call in calls]
    engine.start()
    try:
        return [future.result(10) for future in futures]
    finally:
        engine.stop()


@contextmanager
def started(engine: SweepEngine) -> Iterator[SweepEngine]:
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(RowCounts(64, 64), figures=LINK_BOUND)


@pytest.fixture
def engine(model: FakeModel) -> SweepEngine:
    return SweepEngine(
        StreamedSweeper(model, NO_GRAMMARS), new_pool(Clock(), 16 * LIMITS.slot_rows), LIMITS, max_waiting=100
    )


def test_a_system_prompt_of_eight_sessions_is_computed_once(model: FakeModel, engine: SweepEngine) -> None:
    own = [[n, n + 10, n + 20] for n in range(8)]
    results = answers(engine, [verify_call(f"s{n}", [*SYSTEM, *own[n]]) for n in range(8)])
    assert model.num_computed == 503 + 7 * (503 - BLOCKS)
    assert len(model.batches) == 2, "one for the first, one for all others"
    assert [result.cached_length for result in results] == [0, *[BLOCKS] * 7]
    assert [result.verdict.bonus_token for result in results] == [n + 21 for n in range(8)]


def salted(call: VerifyCall, cache_salt: str) -> VerifyCall:
    return replace(call, context=replace(call.context, cache_salt=cache_salt))


@pytest.mark.parametrize("releases", [True, False])
def test_calls_with_different_salts_share_no_work(model: FakeModel, engine: SweepEngine, releases: bool) -> None:
    """Neither if they wait together, nor of cached rows, nor of rows of ended sessions."""
    own = [[n, n + 10, n + 20] for n in range(4)]
    calls = [salted(verify_call(f"s{n}", [*SYSTEM, *own[n]]), f"tenant{n % 2}") for n in range(4)]
    with started(engine):
        model.gate.clear()
        first = engine.verify(salted(verify_call("first", [*SYSTEM, 9]), ""))
        model.wait_for_sweep()
        futures = [engine.verify(call) for call in calls]
        model.gate.set()
        assert first.result(10).cached_length == 0
        assert [future.result(10).cached_length for future in futures] == [0, 0, BLOCKS, BLOCKS]
        if releases:
            for n in range(4):
                engine.release(ScopedId(f"s{n}")).result(10)
        late = [engine.verify(salted(verify_call(f"late{n}", [*SYSTEM, 30]), f"tenant{n}")) for n in (1, 2)]
        assert [future.result(10).cached_length for future in late] == [BLOCKS, 0]
        same = engine.verify(salted(verify_call("first", [*SYSTEM, 9, 8], epoch=2), "tenant3")).result(10)
        assert same.cached_length == 501, "a session's own text is its own under any salt"
        again = engine.verify(salted(verify_call("other", [*SYSTEM, 9]), "")).result(10)
        assert again.cached_length == 0, "and under the old one nobody's any more"


def test_sessions_that_arrive_while_a_prefix_is_computed_share_it(model: FakeModel, engine: SweepEngine) -> None:
    with started(engine):
        model.gate.clear()
        first = engine.verify(verify_call("first", [*SYSTEM, 1]))
        model.wait_for_sweep()
        later = [engine.verify(verify_call(f"s{n}", [*SYSTEM, n + 2, n])) for n in range(7)]
        model.gate.set()
        assert [future.result(10).cached_length for future in later] == [BLOCKS] * 7
        assert first.result(10).cached_length == 0
    assert model.num_computed == 501 + 7 * (502 - BLOCKS)


def test_the_second_turn_only_computes_new_tokens(model: FakeModel, engine: SweepEngine) -> None:
    with started(engine):
        engine.verify(verify_call("a", [*SYSTEM, 7])).result(10)
        same = engine.verify(verify_call("a", [*SYSTEM, 7, 8, 9, 3], epoch=2)).result(10)
        assert same.cached_length == 501, "with all of the history sent again"
        engine.release(ScopedId("a")).result(10)
        other = engine.verify(verify_call("b", [*SYSTEM, 7, 8, 9, 3, 4, 5])).result(10)
        assert other.cached_length == BLOCKS, "and in whole blocks by a session of another name"


def test_an_edited_turn_is_computed_from_the_edit_on(model: FakeModel, engine: SweepEngine) -> None:
    with started(engine):
        engine.verify(verify_call("a", [*SYSTEM, 7, 8, 9, 3])).result(10)
        edited = engine.verify(verify_call("a", [*SYSTEM, 7, 20, 21], epoch=2)).result(10)
        assert (edited.cached_length, edited.verdict.bonus_token) == (501, 22)
        again = engine.verify(verify_call("a", [*SYSTEM, 7], epoch=3)).result(10)
        assert (again.cached_length, again.verdict.bonus_token, again.held_length) == (500, 8, 501)


def test_a_call_knows_its_computed_tokens_over_several_sweeps(model: FakeModel, engine: SweepEngine) -> None:
    long = [n % 41 for n in range(1000)]
    with started(
        SweepEngine(StreamedSweeper(model, NO_GRAMMARS), engine.pool, replace(LIMITS, max_sweep_tokens=128), 10)
    ) as engine:
        result = engine.verify(verify_call("a", long)).result(10)
        assert (result.cached_length, result.timings.num_passes) == (0, 8)
        longer = engine.verify(verify_call("b", [*long[:-1], 1, 2])).result(10)
        assert longer.cached_length == 992
        figures = engine.pool.figures()
        assert (figures.num_sent, figures.num_computed) == (999 + 1000, 999 + 8)


class Recording:
    """A real model that remembers its logits."""

    best = None

    def __init__(self, model: StreamedModel) -> None:
        self.rows, self.device, self._model, self.kv_bytes = model.rows, model.device, model, 0
        self.logits: list[torch.Tensor] = []
        self.num_computed = 0

    def sweep(self, batch: Batch) -> tuple[torch.Tensor, Timings]:
        logits, figures = self._model.sweep(batch)
        self.logits.append(logits.clone())
        self.num_computed += batch.num_tokens
        return logits, figures


def engine_of(model: Recording, streamed_model: StreamedModel) -> SweepEngine:
    limits = TargetLimits(rows=16, max_sweep_tokens=256, max_nodes=32, max_context=200)
    shape = streamed_model.skeleton.kv_shape()
    arena = KVArena(shape, shape.empty(700, CPU))
    return SweepEngine(StreamedSweeper(model, NO_GRAMMARS), SlotPool(arena, 0.001, Clock()), limits, max_waiting=10)


def sampled_call(session: str, tokens: Sequence[int], max_length: int = 0) -> VerifyCall:
    """With a tree of several branches and a temperature."""
    tree = Tree.of([tokens[-1], 3, 9, 4, 5, 6], [-1, 0, 0, 1, 1, 3], [0.0] * 6)
    params = SamplingParams(temperature=0.8, seed=11, logprobs=4)
    return replace(verify_call(session, tokens, tree=tree, max_length=max_length), sampling=params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_after_a_fork_have_the_same_bits(tiny: Path, dtype: torch.dtype) -> None:
    """Prompts that part within a block, a session that goes back, and one that holds all but its root."""
    rng = np.random.default_rng(4)
    common, ends = rng.integers(0, 256, 107).tolist(), rng.integers(0, 256, (3, 20)).tolist()
    turns = [("a", [*common, *ends[0]]), ("b", [*common, *ends[1]]), ("a", [*common[:90], *ends[2]]), ("c", common)]
    with streamed(tiny, dtype) as model:
        reusing = Recording(model)
        with started(engine_of(reusing, model)) as engine:
            shared = [
                engine.verify(replace(sampled_call(name, tokens, max_length=150), epoch=n)).result(300)
                for n, (name, tokens) in enumerate(turns)
            ]
        assert [result.cached_length for result in shared] == [0, 96, 90, 96]
        assert reusing.num_computed < 127 + 31 + 20 + 11 + 4 * 6
        for turn, (result, logits) in enumerate(zip(shared, reusing.logits, strict=True)):
            alone = Recording(model)
            with started(engine_of(alone, model)) as engine:
                plain = engine.verify(sampled_call("alone", turns[turn][1])).result(300)
            assert plain.cached_length == 0
            assert torch.equal(alone.logits[-1], logits)
            assert (plain.verdict, plain.held_length) == (result.verdict, result.held_length)
