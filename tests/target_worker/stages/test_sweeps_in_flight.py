"""Sweeps that begin while others are at further stages. The model is a fake, whose sweeps end when a test says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from bough.errors import AcceleratorFull, BoughError, Preempted, RingLost, StaleEpoch
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.cost_curve import CostCurve
from bough.protocol.ids import ScopedId
from bough.protocol.messages import VerifyCall, VerifyResult
from bough.sizing.distinct_experts import Mixture
from bough.sizing.sweep_times import SweepTimes
from bough.trees.tree import Tree
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.batching import Part
from target_worker.scheduler.engine import SharedSweeps, Sweep, SweepEngine, SweepsInFlight
from target_worker.scheduler.job import SweepInFlight, Swept, VerifyJob
from target_worker.sweep.streamed_model import StreamedSweeper
from tests.fakes.target import LIMITS, NO_GRAMMARS, VOCAB, Clock, FakeModel, new_pool, verify_call
from tests.fakes.waiting import block_until

STEPS = replace(LIMITS, kv_step=4)
GUESSES = Tree.of([0, 1, 1, 2, 9], [-1, 0, 1, 1, 0], [0.0] * 5)  # of tokens to be added to the root's


class AwaySweeper(StreamedSweeper):
    """Computes at once; `back` ends a sweep."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model, NO_GRAMMARS)  # type: ignore[arg-type]
        self.away: list[Future[None]] = []
        self.begun: list[list[str]] = []  # sessions of each sweep
        self.errors: dict[int, Exception] = {}  # by number of the sweep

    def sweep(self, parts: Sequence[Part[VerifyJob]]) -> SweepInFlight:
        swept, arrived, number = super().sweep(parts), Future[None](), len(self.begun)
        assert isinstance(swept, Swept)

        def finish() -> Swept:
            if (error := self.errors.get(number)) is not None:
                raise error
            return swept

        self.away.append(arrived)
        self.begun.append([part.job.call.context.session_id.name for part in parts])
        return SweepInFlight(arrived, finish)

    def back(self, number: int) -> None:
        self.away[number].set_result(None)


class Target:
    """An engine with two sweeps in flight."""

    def __init__(self, pool: SlotPool, limits: TargetLimits) -> None:
        self.sweeper = AwaySweeper(FakeModel())
        self.engine = SweepEngine(self.sweeper, pool, limits, 100, most_in_flight=2)

    def verify(self, session: str, length: int, held: int = 0, **more: int) -> Future[VerifyResult]:
        """Call with a tree of GUESSES, whose first path of three tokens is right."""
        call = call_of(session, length, held, **more)
        return self.engine.verify(call)

    def wait_for(self, number: int) -> None:
        """Wait until so many sweeps have begun, and no other is about to begin."""
        block_until(lambda: len(self.sweeper.begun) >= number)
        self.settled()

    def settled(self) -> None:
        """Wait until the thread has run all commands."""
        with pytest.raises(BoughError, match="nobody"):
            self.engine.release(ScopedId("nobody")).result(10)

    def back(self, number: int) -> None:
        self.sweeper.back(number)
        self.settled()


def call_of(session: str, length: int, held: int, **more: int) -> VerifyCall:
    tokens = [(len(session) + i) % VOCAB for i in range(length)]
    guesses = [(tokens[-1] + token) % VOCAB for token in GUESSES.tokens.tolist()]
    return verify_call(session, tokens, held, tree=Tree.of(guesses, GUESSES.parents.tolist(), [0.0] * 5), **more)


@contextmanager
def two_in_flight(
    num_rows: int = 8 * LIMITS.slot_rows, lease_seconds: float = 60.0, limits: TargetLimits = STEPS
) -> Iterator[Target]:
    target = Target(new_pool(Clock(), num_rows, lease_seconds), limits)
    target.engine.start()
    try:
        yield target
    finally:
        target.engine.stop()
        target.engine.pool.check_integrity()


def assert_accepted(result: VerifyResult, length: int) -> None:
    assert result.verdict.accepted_nodes == (1, 3), "the right path of GUESSES"
    assert result.held_length == length + 2


def test_a_sweep_begins_while_another_is_away_and_a_third_waits() -> None:
    with two_in_flight() as target:
        first = target.verify("a", 4)
        target.wait_for(1)
        second = target.verify("bb", 4)
        target.wait_for(2)
        third, fourth = target.verify("ccc", 4), target.verify("dddd", 4)
        target.settled()
        assert target.sweeper.begun == [["a"], ["bb"]]
        assert target.engine.num_running == 2
        assert target.engine.num_waiting == 2
        target.back(0)
        assert_accepted(first.result(10), 4)
        target.wait_for(3)
        assert target.sweeper.begun[2] == ["ccc", "dddd"]
        assert not second.done()
        target.back(1)
        target.back(2)
        for each in (second, third, fourth):
            assert_accepted(each.result(10), 4)
        assert target.engine.num_passes == 3
        assert target.engine.num_running == 0


def test_rows_of_a_sweep_that_is_away_move_with_their_slot() -> None:
    """The model asserts that each slot holds its text: it would miss the rows of the tree."""
    with two_in_flight(num_rows=60) as target:
        for round_, session in enumerate(("a", "bb", "ccc")):
            target.verify(session, 4)
            target.wait_for(round_ + 1)
            target.back(round_)
        target.engine.release(ScopedId("a")).result(10)
        moving = target.engine.pool.get(ScopedId("bb"))
        assert moving is not None
        away = target.verify("bb", 7, held=6, round_=1)
        target.wait_for(4)
        began = moving.slot.begin
        growing = target.verify("ccc", 30, held=6, round_=1)  # needs the room of the first, which is elsewhere
        target.wait_for(5)
        assert moving.slot.begin != began, "the case that this test is for"
        target.back(3)
        assert_accepted(away.result(10), 7)
        for number in (4, 5):  # its text takes two sweeps
            target.wait_for(number + 1)
            target.back(number)
        assert_accepted(growing.result(10), 30)
        again = target.verify("bb", 10, held=9, round_=2)
        target.wait_for(7)
        target.back(6)
        assert_accepted(again.result(10), 10)


@pytest.mark.parametrize("how", ["released", "cancelled", "replaced"])
def test_a_call_that_is_dropped_while_away_changes_nothing(how: str) -> None:
    with two_in_flight() as target:
        dropped = target.verify("a", 4)
        target.wait_for(1)
        if how == "released":
            target.engine.release(ScopedId("a")).result(10)
        elif how == "cancelled":
            dropped.cancel()
        newer = target.verify("a", 9, epoch=2)
        target.wait_for(2)
        target.back(0)
        if how != "cancelled":
            with pytest.raises(StaleEpoch):
                dropped.result(10)
        assert not newer.done()
        target.back(1)
        assert_accepted(newer.result(10), 9)
        again = target.verify("a", 12, held=11, epoch=2, round_=1)
        target.wait_for(3)
        target.back(2)
        assert_accepted(again.result(10), 12)


def test_a_session_may_give_way_while_its_sweep_is_away() -> None:
    with two_in_flight(num_rows=36) as target:
        for number, session in enumerate(("a", "bb")):
            target.verify(session, 4, epoch=number + 1)
            target.wait_for(number + 1)
            target.back(number)
        younger = target.verify("bb", 7, held=6, epoch=2, round_=1)
        target.wait_for(3)
        older = target.verify("a", 16, held=6, epoch=1, round_=1)
        target.wait_for(4)
        with pytest.raises(Preempted):
            younger.result(10)
        target.back(2)
        target.back(3)
        assert_accepted(older.result(10), 16)


@pytest.mark.parametrize("error", [RingLost("stage 1 is gone"), AcceleratorFull("no memory")])
def test_a_sweep_that_fails_while_another_is_away_ends_only_its_own_calls(error: Exception) -> None:
    with two_in_flight() as target:
        target.sweeper.errors[0] = error
        failing = target.verify("a", 4)
        target.wait_for(1)
        other = target.verify("bb", 4)
        target.wait_for(2)
        target.back(0)
        with pytest.raises(type(error)):
            failing.result(10)
        target.back(1)
        assert_accepted(other.result(10), 4)
        again = target.verify("a", 4)
        target.wait_for(3)
        target.back(2)
        assert_accepted(again.result(10), 4)


def test_a_prefix_that_a_sweep_in_flight_computes_is_not_computed_again() -> None:
    """The other call waits for its blocks, although a second sweep could begin."""
    limits = replace(STEPS, max_sweep_tokens=64, max_context=200)
    with two_in_flight(500, limits=limits) as target:
        first = target.verify("a", 150)
        target.wait_for(1)
        second = target.verify("b", 150)
        target.settled()
        for number in range(2):
            target.wait_for(number + 1)
            assert target.sweeper.begun[number:] == [["a"]]
            target.back(number)
        target.wait_for(3)
        assert sorted(target.sweeper.begun[2]) == ["a", "b"]
        target.back(2)
        assert_accepted(first.result(10), 150)
        assert_accepted(second.result(10), 150)
        assert second.result(10).cached_length == 128, "whole blocks of what the other has computed"


def test_calls_that_wait_when_the_engine_stops_are_refused() -> None:
    with two_in_flight() as target:
        away = target.verify("a", 4)
        target.wait_for(1)
    with pytest.raises(BoughError, match="shut down"):
        away.result(10)
    target.sweeper.back(0)


def test_random_sessions_keep_their_texts() -> None:
    """Sweeps come back while sessions begin, go on, and end, with too few rows for all of them."""
    rng = np.random.default_rng(5)
    with two_in_flight(num_rows=3 * 48, lease_seconds=0.0) as target:
        lengths, rounds, waiting = dict[str, int](), dict[str, int](), dict[str, Future[VerifyResult]]()
        sent: dict[str, int] = {}
        num_back = num_answers = 0
        while num_answers < 60:
            name = "x" * int(rng.integers(1, 7))
            if name not in waiting and lengths.get(name, 0) < 40:
                held = lengths.get(name, 0)
                sent[name] = length = held + 1 if held else int(rng.integers(3, 30))
                rounds[name] = rounds.get(name, -1) + 1
                waiting[name] = target.verify(name, length, held=held, round_=rounds[name])
            target.settled()
            if num_back < len(target.sweeper.away) and rng.random() < 0.6:
                target.back(num_back)
                num_back += 1
            for name, future in [*waiting.items()]:
                if future.done():
                    del waiting[name]
                    if future.exception() is None:
                        num_answers += 1
                        assert_accepted(future.result(), sent[name])
                        lengths[name] = future.result().held_length
                    else:  # its slot was taken
                        assert isinstance(future.exception(), BoughError)
                        lengths.pop(name, None)
                        target.engine.release(ScopedId(name)).exception(10)
                        rounds.pop(name)


DIVIDED = TargetLimits(rows=1, max_sweep_tokens=64, max_nodes=16, max_context=48)
LINEAR, FLAT = CostCurve((1, 101), (0.1, 10.1)), CostCurve((1, 101), (1.0, 1.1))


@pytest.mark.parametrize(("curve", "num_chosen"), [(LINEAR, 2), (FLAT, 4)])
def test_calls_are_divided_among_sweeps_where_that_answers_them_sooner(curve: CostCurve, num_chosen: int) -> None:
    sweeps = SharedSweeps(new_pool(Clock(), 8 * 64), DIVIDED, SweepTimes(1, 64, curve), 1, 0.0, most_in_flight=2)
    for session in ("a", "bb", "ccc", "dddd"):
        sweeps.calls.admit(call_of(session, 1, 0), Future(), 0)
    parts = sweeps.choose()
    assert len(parts) == num_chosen
    for part in parts:
        part.job.session.slot.num_in_sweep = part.num_tokens
    assert len(sweeps.choose(1)) == 4 - num_chosen


@pytest.mark.parametrize(
    ("link_seconds", "num_tokens"),
    [(0.0, 100), (4.0, 100), (25.0, 250), (99.0, 400)],
    ids=["no link", "a fast one", "a slow one", "slower than the largest sweep"],
)
def test_by_default_a_sweep_has_more_tokens_while_the_link_takes_longer(link_seconds: float, num_tokens: int) -> None:
    """Up to what memory allows, of a prompt of 450; a given limit applies as it is."""
    limits, curve = replace(DIVIDED, max_sweep_tokens=400, max_context=500), CostCurve((1, 401), (0.1, 40.1))
    for least, wanted in ((100, num_tokens), (0, 400)):
        times = SweepTimes(1, 400, curve, 1000, link_seconds)
        sweeps = SharedSweeps(new_pool(Clock(), 600), replace(limits, least_sweep_tokens=least), times, 1, 0.0)
        sweeps.calls.admit(call_of("a", 450, 0), Future(), 0)
        assert [part.num_context for part in sweeps.choose()] == pytest.approx([wanted], abs=1)


def test_trees_that_wait_together_are_cut_to_the_rows_with_logits() -> None:
    limits = replace(DIVIDED, max_sweep_tokens=400, max_nodes=5, kv_sessions=2)
    assert limits.max_logit_rows == 10
    sweeps = SharedSweeps(new_pool(Clock(), 600), limits, SweepTimes(1, 400, FLAT), 1, 0.0)
    for session in ("a", "bb", "ccc"):
        sweeps.calls.admit(call_of(session, 1, 0), Future(), 0)
    assert sum(part.job.num_nodes for part in sweeps.choose() if part.has_tree) <= 10


def test_a_call_does_not_wait_for_a_prefix_in_a_sweep_that_takes_longer_than_its_own() -> None:
    limits, curve = replace(DIVIDED, max_sweep_tokens=400, max_context=500), CostCurve((1, 401), (0.1, 40.1))
    sweeps = SharedSweeps(new_pool(Clock(), 1200), limits, SweepTimes(1, 400, curve), 1, 0.0, most_in_flight=2)
    sweeps.calls.admit(call_of("a", 350, 0), Future(), 0)
    (leader,) = sweeps.choose()
    leader.job.session.slot.num_in_sweep = leader.num_tokens
    short = call_of("a", 70, 0).context.tokens
    sweeps.calls.admit(verify_call("b", short, tree=GUESSES), Future(), 0)
    assert [part.num_context for part in sweeps.choose(1)] == [68], "it is answered after 7.4 s, not after 35.5 s"


def test_the_second_half_of_calls_that_were_divided_does_not_wait_anew() -> None:
    """A sweep of all of them would have begun, however long another session still drafts."""
    sweeps = SharedSweeps(new_pool(Clock(), 8 * 64), DIVIDED, SweepTimes(1, 64, LINEAR), 1, 1.0, most_in_flight=2)
    delay, away = sweeps.delay, ScopedId("away")
    delay.swept(10.0)
    delay.answered(away, 0.0)
    delay.arrived(away, 9.0)
    for session in ("a", "bb", "ccc", "dddd"):
        sweeps.calls.admit(call_of(session, 1, 0), Future(), 0)
        delay.arrived(ScopedId(session), 13.0, num_running=5)
    for now, waits in ((14.0, 10.0), (23.0, 1.0), (24.0, 0.0)):
        delay.answered(away, now)
        assert sweeps.wait_seconds(now) == waits
    for part in sweeps.choose():
        part.job.session.slot.num_in_sweep = part.num_tokens
    assert len(sweeps.calls.ready()) == 2
    assert sweeps.wait_seconds(24.0) == 0.0
    assert len(sweeps.choose(1)) == 2


def test_sweep_times_are_learnt_by_the_number_in_flight() -> None:
    sweeps = SharedSweeps(new_pool(Clock(), 8 * 64), DIVIDED, SweepTimes(1, 64, FLAT), 1, 0.0, most_in_flight=2)
    for _ in range(20):
        sweeps.observe_times(16, 1.0, 0.0, 0)
        sweeps.observe_times(16, 1.7, 0.0, 0, num_in_flight=2)
    alone, beside = sweeps.times_of(1).curve(), sweeps.times_of(2).curve()
    assert alone is not None
    assert beside is not None
    assert alone(16) == pytest.approx(1.0, rel=0.05)
    assert beside(16) == pytest.approx(1.7, rel=0.05)
    assert sweeps.cost == alone


def test_distinct_experts_are_learnt_by_the_number_in_flight() -> None:
    times = SweepTimes(1, 64, FLAT, mixture=Mixture(64, 4))
    sweeps = SharedSweeps(new_pool(Clock(), 8 * 64), DIVIDED, times, 1, 0.0, most_in_flight=2)
    for _ in range(20):
        sweeps.observe_times(16, 1.7, 0.0, 0, expert_ratio=2.0, num_in_flight=2)
    assert sweeps.times_of(2).expert_ratio(16) == pytest.approx(2.0, rel=0.1)


def test_a_sweep_without_memory_does_not_raise_the_limit_that_another_has_lowered() -> None:
    """It was begun before."""
    with two_in_flight(limits=replace(STEPS, max_sweep_tokens=64, max_nodes=8)) as target:
        for number in range(2):
            target.sweeper.errors[number] = AcceleratorFull("no memory")
        target.verify("a", 15)
        target.wait_for(1)
        target.verify("bb", 30)
        target.wait_for(2)
        target.back(0)
        assert target.engine._sweeps.most_tokens == 9
        target.back(1)
        assert target.engine._sweeps.most_tokens == 9


def test_a_sweep_counts_as_one_of_two_if_another_ran_for_most_of_its_time() -> None:
    clock = Clock()
    in_flight = SweepsInFlight(clock)
    first, second, third = (Sweep([], 0) for _ in range(3))
    for sweep, seconds in ((first, 9.0), (second, 1.0)):
        in_flight.begin(sweep)
        clock.now += seconds
    assert in_flight.mean_number(first) == 1, "the other ran for a tenth of its time"
    in_flight.end(first)
    in_flight.begin(third)
    clock.now += 8.0
    assert in_flight.mean_number(second) == 2
    in_flight.end(second)
    clock.now += 24.0
    assert in_flight.mean_number(third) == 1
