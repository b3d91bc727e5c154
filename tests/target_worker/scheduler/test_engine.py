"""The engine and its slots with a fake model: packing, idempotency, epochs, leases, faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import (
    Exhausted,
    InvalidRequest,
    NotFound,
    PrefixMissing,
    RingLost,
    StaleEpoch,
    StreamError,
    Unavailable,
)
from bough.model.batch.batch import Batch
from bough.model.kv.session_kv import KVSlot
from bough.protocol.cost_curve import CostCurve
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Timings, VerifyCall, VerifyResult
from bough.protocol.sampling_params import SamplingParams
from bough.sizing.sweep_times import SweepTimes
from bough.trees.tree import Tree
from target_worker.scheduler.engine import SweepEngine
from target_worker.verification.verify import walk
from tests.fakes.target import CPU, LIMITS, SHAPE, VOCAB, Clock, FakeModel, new_pool, running, verify_call


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(model: FakeModel, clock: Clock) -> Iterator[SweepEngine]:
    with running(model, new_pool(clock)) as engine:
        yield engine


def test_only_the_targets_tokens_are_accepted() -> None:
    tree = Tree.of([1, 9, 2, 3, 7, 4], [-1, 0, 0, 2, 2, 3], [0, -1, -1, -1, -1, -1])
    verdict = walk(tree, lambda path: int(tree.tokens[path[-1]]) + 1)
    assert (verdict.accepted_nodes, verdict.bonus_token) == ((2, 3, 5), 5)
    assert walk(tree, lambda _: 40).accepted_nodes == ()


def test_a_warm_up_leaves_nothing_and_reports_its_error(engine: SweepEngine, model: FakeModel) -> None:
    before = engine.pool.figures()
    engine.warm_up().result(5)
    model.error = StreamError("layer 1 is broken")
    with pytest.raises(StreamError, match="layer 1 is broken"):
        engine.warm_up().result(5)
    model.error = None
    assert (engine.pool.figures(), model.batches) == (before, [])
    assert engine.verify(verify_call("a", [1, 2])).result(5).verdict.bonus_token == 3


def test_a_warm_up_asks_for_no_more_logits_than_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """It times a tree of as many nodes as its slot has rows."""
    rows: list[int] = []
    monkeypatch.setattr(FakeModel, "warm_up", lambda _, slot, __: rows.append(slot.num_rows))
    for limits in (LIMITS, replace(LIMITS, max_nodes=3, kv_sessions=2)):
        with running(FakeModel(), new_pool(Clock()), limits) as engine:
            engine.warm_up().result(5)
    assert rows == [8, 6], "rows of a chunk, and two trees"


def test_a_verdict_reports_its_sweep_and_the_cost_curve(engine: SweepEngine, model: FakeModel) -> None:
    assert engine.cost is None
    model.gate.clear()
    first = engine.verify(verify_call("z", [1]))
    model.wait_for_sweep()
    calls = [engine.verify(verify_call("a", [5, 6, 7], max_length=4)), engine.verify(verify_call("b", [9], 0, 0, 1))]
    model.gate.set()
    alone, shared = first.result(5), calls[0].result(5)
    assert (alone.num_rows, alone.num_trees) == (1, 1)
    assert (shared.num_rows, shared.num_trees) == (4, 2), "the context's rows, and a root of each"
    assert shared.left_out_nodes == ()
    assert shared.cost is not None
    shared.cost.validate("cost")
    assert shared.cost(1) == pytest.approx(1e-7), "as long as the fake says that it waited"
    assert engine.cost is not None


def test_the_cost_curve_of_the_warm_up_is_reported_before_the_first_sweep(
    engine: SweepEngine, model: FakeModel
) -> None:
    model.times = SweepTimes(8, LIMITS.max_sweep_tokens, CostCurve((8, 16), (0.5, 0.9), 8), 1000, 0.7)
    engine.warm_up().result(5)
    assert engine.cost is not None
    assert [engine.cost(rows) for rows in (1, 16)] == pytest.approx([0.7, 0.9])


def test_successive_rounds_continue_the_text(engine: SweepEngine) -> None:
    first = engine.verify(verify_call("a", [5, 6, 7])).result(5)
    assert (first.verdict.bonus_token, first.held_length) == (8, 3)
    tree = Tree.of([8, 20, 9, 10], [-1, 0, 0, 2], [0, -1, -1, -1])
    second = engine.verify(verify_call("a", [5, 6, 7, 8], held=3, round_=1, tree=tree)).result(5)
    assert (second.verdict.accepted_nodes, second.verdict.bonus_token, second.held_length) == ((2, 3), 11, 6)
    assert (second.timings.wait_ns, second.timings.compute_ns, second.timings.link_bytes) == (40, 60, 1000)


def test_a_long_context_takes_several_sweeps_that_others_share(engine: SweepEngine, model: FakeModel) -> None:
    model.gate.clear()
    long, short = engine.verify(verify_call("long", list(range(40)))), engine.verify(verify_call("short", [3, 4]))
    model.gate.set()
    assert long.result(5).verdict.bonus_token == 40
    assert short.result(5).verdict.bonus_token == 5
    assert max(batch.num_tokens for batch in model.batches) <= 16
    assert long.result().timings.num_passes == 3


def test_a_round_during_another_of_its_session_is_refused(engine: SweepEngine, model: FakeModel) -> None:
    """Round 0 takes several sweeps, so that its session's next call comes in between."""
    model.gate.clear()
    running = engine.verify(verify_call("a", list(range(40))))
    model.wait_for_sweep()
    early = engine.verify(verify_call("a", [1, 2], round_=1))
    released = engine.release(ScopedId("a"))
    model.gate.set()
    with pytest.raises(StaleEpoch, match="round: must be 0 of epoch 1, which is in flight"):
        early.result(5)
    released.result(5)
    with pytest.raises(StaleEpoch, match="was released"):
        running.result(5)


def test_a_repeated_round_gets_the_first_answer(engine: SweepEngine, model: FakeModel) -> None:
    model.gate.clear()
    twins = [engine.verify(verify_call("a", [1, 2])) for _ in range(2)]
    model.gate.set()
    assert twins[0].result(5) is twins[1].result(5)
    assert engine.verify(verify_call("a", [1, 2])).result(5) is twins[0].result()
    assert len(model.batches) == 1


def test_a_delayed_call_does_not_undo_later_ones(engine: SweepEngine, model: FakeModel) -> None:
    """A copy of round 0 that comes after round 1 once rolled the session back, and round 2 was refused meanwhile."""
    engine.verify(verify_call("a", [1, 2])).result(5)
    engine.verify(verify_call("a", [1, 2, 3], held=2, round_=1)).result(5)
    model.gate.clear()
    late, real = engine.verify(verify_call("a", [1, 2])), engine.verify(verify_call("a", [1, 2, 3, 4], 3, round_=2))
    model.gate.set()
    with pytest.raises(StaleEpoch, match="round: must be at least 1, the last one answered, got 0"):
        late.result(5)
    assert (real.result(5).verdict.bonus_token, len(model.batches)) == (5, 3)


def test_a_newer_epoch_ends_an_older_one(engine: SweepEngine, model: FakeModel) -> None:
    model.gate.clear()
    old = engine.verify(verify_call("a", [1, 2], epoch=1))
    model.wait_for_sweep()
    model.gate.set()
    assert old.result(5).verdict.bonus_token == 3
    assert engine.verify(verify_call("a", [1, 7], epoch=2)).result(5).verdict.bonus_token == 8
    with pytest.raises(StaleEpoch, match="epoch: must be at least 2, the session's, got 1"):
        engine.verify(verify_call("a", [1, 2], epoch=1)).result(5)


def test_wrong_assumptions_about_the_session_are_answered_with_its_state(engine: SweepEngine) -> None:
    engine.verify(verify_call("a", [1, 2, 3])).result(5)
    with pytest.raises(PrefixMissing, match="but 3 tokens are") as caught:
        engine.verify(verify_call("a", [1, 2, 3, 4, 5, 6], held=5, round_=1)).result(5)
    assert caught.value.held_length == 3
    with pytest.raises(PrefixMissing, match="but other tokens are"):
        engine.verify(verify_call("a", [1, 9, 3], held=2, round_=1)).result(5)
    with pytest.raises(PrefixMissing) as caught:
        engine.verify(verify_call("unknown", [1, 2, 3], held=2)).result(5)
    assert (caught.value.held_length, len(engine.pool)) == (0, 1), "the unknown session takes no slot"
    assert engine.verify(verify_call("a", [1, 2, 30], held=2, round_=1)).result(5).verdict.bonus_token == 31


def test_a_context_that_is_too_long_is_refused(engine: SweepEngine) -> None:
    with pytest.raises(InvalidRequest, match="context: must have at most 48 tokens, got 49"):
        engine.verify(verify_call("a", list(range(49)))).result(5)
    chain = Tree.of([7, 8, 9], [-1, 0, 1], [0.0, -1.0, -1.0])
    with pytest.raises(InvalidRequest, match="tree: positions must be from 0 to 47, got 48"):
        engine.verify(verify_call("a", [1] * 46 + [7], tree=chain)).result(5)
    assert engine.verify(verify_call("a", [1] * 45 + [7], tree=chain)).result(5).verdict.accepted_nodes == (1, 2)


def test_a_superseded_caller_cannot_release_the_session(engine: SweepEngine) -> None:
    """Otherwise an orchestrator that tidies up behind a broken stream would end the stream that resumed it."""
    engine.verify(verify_call("a", [5, 6], epoch=3)).result(5)
    with pytest.raises(StaleEpoch):
        engine.release(ScopedId("a"), epoch=2).result(5)
    engine.release(ScopedId("a"), epoch=3).result(5)
    with pytest.raises(NotFound):
        engine.release(ScopedId("a"), epoch=3).result(5)


def test_a_slot_has_room_for_trees_of_recent_sizes(engine: SweepEngine) -> None:
    engine.verify(verify_call("a", [1])).result(5)
    session = engine.pool.get(ScopedId("a"))
    assert session is not None
    assert session.slot.num_rows == LIMITS.max_context + LIMITS.rows
    chain = Tree.of(range(2, 14), range(-1, 11), [0.0] * 12)
    engine.verify(verify_call("a", [1, 2], held=1, round_=1, tree=chain)).result(5)
    assert session.slot.num_rows == LIMITS.max_context + 2 * LIMITS.rows
    engine.pool.check_integrity()


def test_a_failed_sweep_only_fails_its_calls(engine: SweepEngine, model: FakeModel) -> None:
    engine.verify(verify_call("a", [1, 2])).result(5)
    model.error = StreamError("file: layer 3: gone")
    with pytest.raises(StreamError, match="layer 3"):
        engine.verify(verify_call("a", [1, 2, 3], held=2, round_=1)).result(5)
    assert engine.verify(verify_call("a", [1, 2, 3], held=2, round_=1)).result(5).verdict.bonus_token == 4


def test_nan_logits_only_fail_their_call(engine: SweepEngine, model: FakeModel) -> None:
    real = model.sweep

    def broken(batch: Batch) -> tuple[torch.Tensor, Timings]:
        logits, figures = real(batch)
        logits[batch.input_ids[0, batch.logit_rows] == 13] = float("nan")
        return logits, figures

    model.sweep = broken
    with pytest.raises(Unavailable, match="not numbers"):
        engine.verify(verify_call("a", [13])).result(5)
    assert engine.verify(verify_call("b", [1])).result(5).verdict.bonus_token == 2


@given(st.lists(st.integers(0, 63), min_size=1, max_size=12, unique=True), st.integers(0, 10))
def test_compaction_moves_exactly_the_accepted_rows(rows: list[int], start: int) -> None:
    slot = KVSlot(SHAPE, 64, CPU)
    slot.keys[0, :, 0, 0] = torch.arange(64)
    slot.values[0, :, 0, 0] = torch.arange(64) + 0.5
    slot.tokens.extend(range(start))
    slot.compact(rows, list(range(len(rows))))
    end = start + len(rows)
    assert slot.keys[0, start:end, 0, 0].tolist() == rows
    assert slot.values[0, start:end, 0, 0].tolist() == [row + 0.5 for row in rows]
    assert slot.keys[0, :start, 0, 0].tolist() == list(range(start))
    assert slot.length == end
    assert np.array_equal(slot.keys[0, end:, 0, 0], np.arange(end, 64))


def test_an_invalid_start_changes_nothing(engine: SweepEngine) -> None:
    engine.verify(verify_call("a", [1, 2, 3])).result(5)
    before = engine.pool.figures()
    for start in (7, 40):
        with pytest.raises(PrefixMissing):
            engine.verify(verify_call("a", list(range(start + 1)), held=start, epoch=2)).result(5)
    assert engine.pool.figures() == before
    session = engine.pool.get(ScopedId("a"))
    assert session is not None
    assert session.slot.tokens == [1, 2, 3]
    assert session.epoch == 1, "who does not know what is held has not begun an epoch"


def test_an_abandoned_call_leaves_before_the_next_sweep(engine: SweepEngine, model: FakeModel) -> None:
    """Two hang on the first call's sweep; one of them has gone by its end, and its slot is idle at once."""
    model.gate.clear()
    first = engine.verify(verify_call("a", [1]))
    model.wait_for_sweep()
    left, stayed = engine.verify(verify_call("b", [10, 11])), engine.verify(verify_call("c", [20, 21]))
    left.cancel()
    model.gate.set()
    assert stayed.result(5).verdict.bonus_token == 22
    assert first.result(5).verdict.bonus_token == 2
    assert [batch.num_tokens for batch in model.batches] == [1, 2]
    figures = engine.pool.figures()
    assert (figures.num_held, engine.num_waiting) == (2, 0)


def test_passes_are_counted_when_they_end(engine: SweepEngine, model: FakeModel) -> None:
    before = engine.num_passes
    model.gate.clear()
    call = engine.verify(verify_call("a", [1]))
    model.wait_for_sweep()
    assert (engine.num_running, engine.num_passes) == (1, before), "it is under way, however long that takes"
    model.gate.set()
    call.result(5)
    engine.release(ScopedId("a")).result(5)  # on the sweep thread, after the sweep
    assert engine.num_passes == before + 1


def test_an_abandoned_unfinished_call_leaves_and_may_be_repeated(engine: SweepEngine, model: FakeModel) -> None:
    model.gate.clear()
    long = engine.verify(verify_call("a", list(range(40))))
    model.wait_for_sweep()
    long.cancel()
    model.gate.set()
    assert engine.verify(verify_call("b", [1])).result(5).verdict.bonus_token == 2
    assert len(model.batches) == 2
    again = engine.verify(verify_call("a", list(range(40)))).result(5)
    assert (again.verdict.bonus_token, again.cached_length) == (40, 16), "what was computed is not computed again"


def test_a_call_stays_while_one_of_its_callers_waits(engine: SweepEngine, model: FakeModel) -> None:
    model.gate.clear()
    busy = engine.verify(verify_call("z", [1]))
    model.wait_for_sweep()
    twins = [engine.verify(verify_call("a", [5, 6])) for _ in range(2)]
    twins[0].cancel()
    model.gate.set()
    assert twins[1].result(5).verdict.bonus_token == 7
    assert busy.result(5).verdict.bonus_token == 2


def test_calls_beyond_the_queue_are_refused_at_once(model: FakeModel, clock: Clock) -> None:
    with running(model, new_pool(clock), max_waiting=2) as engine:
        model.gate.clear()
        calls = [engine.verify(verify_call(session, [1])) for session in ("a", "b")]
        with pytest.raises(Exhausted, match="2 calls are waiting already; try again, or use a larger --max-waiting"):
            engine.verify(verify_call("c", [1])).result(0)
        model.gate.set()
        assert [call.result(5).verdict.bonus_token for call in calls] == [2, 2]
        engine.verify(verify_call("a", [1, 2], held=1, round_=1)).result(5)


def test_a_draining_engine_finishes_running_calls_and_begins_none(engine: SweepEngine, model: FakeModel) -> None:
    engine.verify(verify_call("old", [1])).result(5)
    model.gate.clear()
    running = engine.verify(verify_call("a", list(range(40))))
    model.wait_for_sweep(2)
    drained = engine.drain()
    refused, known = engine.verify(verify_call("new", [1])), engine.verify(verify_call("old", [1, 2], 1, round_=1))
    assert not drained.done()
    model.gate.set()
    with pytest.raises(Unavailable, match="draining: new sessions must go to another one"):
        refused.result(5)
    assert running.result(5).verdict.bonus_token == 40
    assert known.result(5).verdict.bonus_token == 3
    drained.result(5)
    assert engine.drain().result(5) is None


def test_a_stopped_engine_leaves_no_waiting_caller(model: FakeModel, clock: Clock) -> None:
    with running(model, new_pool(clock)) as engine:
        model.gate.clear()
        left = engine.verify(verify_call("a", list(range(40))))
        model.wait_for_sweep()
        threading.Timer(0.05, model.gate.set).start()
        engine.stop()
        with pytest.raises(Unavailable, match="shut down"):
            left.result(0)


def test_calls_to_a_stopped_engine_are_refused(model: FakeModel, clock: Clock) -> None:
    """Such a call once waited for an answer forever."""
    with running(model, new_pool(clock)) as engine:
        engine.stop()
        for late in (engine.verify(verify_call("a", [1, 2])), engine.release(ScopedId("a"))):
            with pytest.raises(Unavailable, match="shut down"):
                late.result(5)
        assert engine.num_waiting == 0


def test_a_failed_verdict_only_affects_its_call(engine: SweepEngine, model: FakeModel) -> None:
    """An error without a name once failed all that were in the sweep."""
    model.gate.clear()
    engine.verify(verify_call("z", [1], max_length=4))
    model.wait_for_sweep()
    beyond = replace(
        verify_call("a", [VOCAB + 9, 2], max_length=4), sampling=SamplingParams(temperature=0.0, repetition_penalty=2.0)
    )
    calls = [engine.verify(beyond), engine.verify(verify_call("b", [1, 2], max_length=4))]
    model.gate.set()
    assert calls[1].result(5).verdict.bonus_token == 3
    with pytest.raises(IndexError):
        calls[0].result(5)
    assert engine.pool.figures().num_sessions == 3
    assert engine.verify(verify_call("a", [1, 2], round_=1)).result(5).verdict.bonus_token == 3


def test_the_thread_survives_errors_before_a_sweep(
    engine: SweepEngine, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once ended, and every later call waited forever."""
    model.gate.clear()
    engine.verify(verify_call("z", [1], max_length=4))
    model.wait_for_sweep()
    calls = [engine.verify(verify_call(name, [1, 2], max_length=4)) for name in "ab"]
    with monkeypatch.context() as patched:
        patched.setattr("target_worker.scheduler.engine.choose_shared", lambda *_: 1 / 0)
        model.gate.set()
        for call in calls:
            with pytest.raises(ZeroDivisionError):
                call.result(5)
    assert engine.verify(verify_call("a", [1, 2])).result(5).verdict.bonus_token == 3


def test_calls_that_wait_when_keys_and_values_are_lost_send_their_tokens_again(model: FakeModel, clock: Clock) -> None:
    """A stage has forgotten its rows; what the head's slots say is not there any more."""
    are_lost = threading.Event()

    def lost_kv() -> bool:
        was_lost = are_lost.is_set()
        are_lost.clear()
        return was_lost

    with running(model, new_pool(clock, 4 * LIMITS.slot_rows), lost_kv=lost_kv) as engine:
        assert engine.verify(verify_call("a", [1, 2])).result(5).held_length == 2
        engine.verify(verify_call("idle", [7, 8])).result(5)
        engine.release(ScopedId("idle")).result(5)
        model.gate.clear()
        swept = engine.verify(verify_call("z", [1]))
        model.wait_for_sweep(3)
        waiting = [engine.verify(verify_call("a", [1, 2, 3], held=2, round_=1)), engine.verify(verify_call("b", [4]))]
        are_lost.set()
        model.gate.set()
        assert swept.result(5).verdict.bonus_token == 2, "it was computed before"
        for call in waiting:
            with pytest.raises(PrefixMissing, match="a stage has lost what it held; send the session's tokens") as lost:
                call.result(5)
            assert lost.value.held_length == 0
        for name in ("a", "b", "z", "idle"):
            with pytest.raises(NotFound, match="has no slot here"):
                engine.release(ScopedId(name)).result(5)
        figures = engine.pool.figures()
        assert (figures.num_sessions, figures.num_tokens, figures.num_held, figures.num_idle) == (0, 0, 0, 0)
        engine.pool.check_integrity()
        for name, tokens in (("a", [1, 2, 3]), ("b", [4]), ("z", [1, 2])):
            assert engine.verify(verify_call(name, tokens, round_=1)).result(5).verdict.bonus_token == tokens[-1] + 1
        engine.pool.check_integrity()


def test_calls_fail_while_a_stage_is_missing_and_work_when_it_is_back(model: FakeModel, clock: Clock) -> None:
    missing = RingLost("stage 1 is missing")

    def lost_kv() -> bool:
        if is_missing:
            raise missing
        return False

    is_missing = True
    with running(model, new_pool(clock), lost_kv=lost_kv) as engine:
        for name in "ab":
            with pytest.raises(RingLost, match=r"^stage 1 is missing$"):
                engine.verify(verify_call(name, [1, 2])).result(5)
        engine.pool.check_integrity()
        is_missing = False
        assert engine.verify(verify_call("a", [1, 2])).result(5).verdict.bonus_token == 3


def test_drafting_sessions_are_waited_for(clock: Clock) -> None:
    """Two sessions whose sweeps take a second and whose drafting takes a moment: rounds go together."""
    model = FakeModel(figures=Timings(1_000_000_000, 0, 0, 1_000_000_000, 0, 0, 1, 0))
    with running(model, new_pool(clock), max_delay=0.9) as engine:
        tokens = {"a": [1], "b": [1]}
        for round_ in range(6):
            calls = {}
            for name in tokens:
                time.sleep(0.01)  # what drafting takes; the second comes later than the first
                held = len(tokens[name]) - 1
                calls[name] = engine.verify(verify_call(name, tokens[name], held, round_=round_))
            for name, call in calls.items():
                tokens[name].append(call.result(5).verdict.bonus_token)
        assert sum(batch.num_tokens == 2 for batch in model.batches) >= 3


HOUR_NS = 3_600_000_000_000
AN_HOUR = Timings(HOUR_NS, compute_ns=HOUR_NS, num_passes=1)  # as if a sweep had taken one: a wait lasts


def say(engine: SweepEngine, name: str, tokens: list[int], round_: int, num_running: int) -> Future[VerifyResult]:
    """A session's call, of a caller that says how many it runs."""
    verify = verify_call(name, tokens, len(tokens) - 1, round_)
    return engine.verify(replace(verify, caller="o", num_running=num_running))


@pytest.mark.slow
def test_a_session_that_repeatedly_finds_no_room_delays_nobody(clock: Clock) -> None:
    """It is counted as running and its calls are refused: once every one of them was news of a session to wait for."""
    model = FakeModel(figures=AN_HOUR)
    with running(model, new_pool(clock), max_delay=1.0) as engine:
        for round_ in range(3):
            for each in [say(engine, name, [*range(1, round_ + 2)], round_, 2) for name in ("a", "b")]:
                each.result(5)
            time.sleep(0.2)
        calls = [say(engine, name, [1, 2, 3, 4], 3, 3) for name in ("a", "b")]
        time.sleep(0.3)
        for _ in range(100):
            with pytest.raises(Exhausted):
                say(engine, "c", [1], 0, 3).result(5)
            time.sleep(0.05)
            if all(each.done() for each in calls):
                break
        assert all(each.done() for each in calls), "five seconds are far more than sessions take to come back here"


def asking(session: str, tokens: Sequence[int], round_: int = 0, epoch: int = 1) -> VerifyCall:
    """For room, without a context."""
    return replace(verify_call(session, tokens, len(tokens) - 1, round_, epoch), reserves=True)


def test_a_session_can_reserve_room_before_sending_anything(engine: SweepEngine) -> None:
    """A call that waits for room asks without its context, and later calls do not take its room."""
    text = list(range(1, 21))
    engine.verify(verify_call("first", text)).result(5)
    with pytest.raises(PrefixMissing, match="a session that is not known here"):
        engine.verify(asking("waiting", text)).result(5)
    assert engine.pool.figures().num_held == 2
    with pytest.raises(Exhausted):
        engine.verify(verify_call("between", text)).result(5)
    with pytest.raises(Exhausted):
        engine.verify(asking("asks", text)).result(5)
    assert engine.verify(verify_call("waiting", text)).result(5).verdict.bonus_token == text[-1] + 1
    engine.release(ScopedId("first")).result(5)
    with pytest.raises(PrefixMissing):
        engine.verify(asking("asks", text)).result(5)
    engine.pool.check_integrity()


def test_a_session_that_asks_for_more_room_keeps_its_tokens(engine: SweepEngine) -> None:
    text = list(range(1, 21))
    engine.verify(verify_call("s", text[:10], max_length=12)).result(5)
    with pytest.raises(PrefixMissing) as missing:
        engine.verify(asking("s", text, round_=1, epoch=2)).result(5)
    assert missing.value.held_length == 10
    session = engine.pool.get(ScopedId("s"))
    assert session is not None
    assert session.slot.num_rows >= LIMITS.max_context
    assert engine.verify(verify_call("s", text, held=10, round_=1, epoch=2)).result(5).cached_length == 10
