"""KV memory that is full: slots grow in steps, younger sessions give way, and every session's tokens are its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from bough.errors import Exhausted, Preempted, PrefixMissing, StaleEpoch
from bough.model.kv.session_kv import KVArena
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, VerifyCall, VerifyResult
from bough.sizing.row_counts import OWN_MOST
from bough.trees.tree import Tree
from target_worker.kv.slot_index import SessionSlot, SlotState, Text
from target_worker.kv.slot_pool import ASKING_SECONDS, SlotPool
from target_worker.scheduler.engine import SweepEngine
from target_worker.scheduler.request_queue import CallQueue
from tests.fakes.target import CPU, GREEDY, LIMITS, SHAPE, VOCAB, Clock, FakeModel, new_pool, running

STEP = 8
FULL = replace(LIMITS, kv_step=STEP)  # 48 tokens of context, and a tree of 16
PROMPT = 5


@dataclass
class Caller:
    """An orchestrator's side of a session: sends what is missing, and asks again where there is no room."""

    name: str
    epoch: int
    tokens: list[int]
    held: int = 0
    round: int = 0
    errors: list[Exception] = field(default_factory=list)  # of rounds after the first

    @classmethod
    def of(cls, number: int) -> Caller:
        return cls(f"s{number}", 10 + number, [(7 * number + place) % VOCAB for place in range(PROMPT)])

    def call(self) -> VerifyCall:
        root = self.tokens[-1]
        tree = Tree.of([root, (root + 1) % VOCAB, 3], [-1, 0, 0], [0.0, -1.0, -2.0])  # one of two guesses is right
        context = Context.of(ScopedId(self.name), self.tokens, self.held, PROMPT)
        return VerifyCall(context, self.epoch, self.round, tree, GREEDY)

    def step(self, engine: SweepEngine) -> bool:
        """A round; False where it was refused."""
        for _ in range(3):
            try:
                result = engine.verify(self.call()).result(5)
            except PrefixMissing as missing:
                self.held = missing.held_length
                continue
            except Exhausted as refusal:
                self.errors += [refusal] if self.round else []
                return False
            self.tokens += result.verdict.tokens_of(self.call().tree)
            self.held, self.round = result.held_length, self.round + 1
            return True
        raise AssertionError("what it holds changes from one answer to the next")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> SlotPool:
    return SlotPool(KVArena(SHAPE, SHAPE.empty(FULL.slot_rows + 8, CPU)), 60.0, clock, STEP)


@pytest.fixture
def engine(pool: SlotPool) -> Iterator[SweepEngine]:
    with running(FakeModel(), pool, FULL) as engine:
        yield engine


def rows_of(pool: SlotPool, name: str) -> int:
    session = pool.get(ScopedId(name))
    return 0 if session is None else session.slot.num_rows


def test_a_slot_grows_in_steps_up_to_its_limit(engine: SweepEngine, pool: SlotPool) -> None:
    caller, rows = Caller.of(0), []
    while len(caller.tokens) < FULL.max_context:
        assert caller.step(engine)
        rows.append(rows_of(pool, caller.name))
    assert [*dict.fromkeys(rows)] == [length + FULL.rows for length in range(STEP, FULL.max_context + 1, STEP)]
    brief = replace(Caller.of(1).call(), max_length=PROMPT + 1)
    engine.release(ScopedId("s0")).result(5)
    engine.verify(brief).result(5)
    assert rows_of(pool, "s1") == PROMPT + 1 + FULL.rows


def test_a_tree_has_room_for_fewer_rows_than_a_gpus_layers_compute_together(clock: Clock) -> None:
    """It was as large as the largest tree: 84 MB more than before for each session of a 70B."""
    limits = replace(FULL, rows=4 * OWN_MOST, max_nodes=2 * OWN_MOST)
    pool = SlotPool(KVArena(SHAPE, SHAPE.empty(limits.slot_rows, CPU)), 60.0, clock, STEP)
    with running(FakeModel(), pool, limits) as engine:
        assert Caller.of(0).step(engine)
        assert rows_of(pool, "s0") == STEP + OWN_MOST


@pytest.mark.slow
@pytest.mark.parametrize(("num_sessions", "step"), [(2, STEP), (5, 1), (5, STEP), (9, 3), (9, 100)])
def test_sessions_that_do_not_fit_together_all_end_with_their_own_tokens(
    clock: Clock, pool: SlotPool, num_sessions: int, step: int
) -> None:
    """Each is as long as the context, of which little more than one fits; they call in any order."""
    callers, chance = [Caller.of(number) for number in range(num_sessions)], Random(num_sessions)
    with running(FakeModel(), pool, replace(FULL, kv_step=step)) as engine:
        for _ in range(1000):
            clock.now += 0.25
            for caller in chance.sample(callers, num_sessions):
                if len(caller.tokens) < FULL.max_context and caller.step(engine):
                    pool.check_integrity()
                    if len(caller.tokens) >= FULL.max_context:
                        engine.release(ScopedId(caller.name)).result(5)
            if all(len(caller.tokens) >= FULL.max_context for caller in callers):
                break
    for number, caller in enumerate(callers):
        assert caller.tokens == [(7 * number + place) % VOCAB for place in range(len(caller.tokens))]
        assert len(caller.tokens) >= FULL.max_context, "it never came to its end"
    assert not callers[0].errors, "the oldest always has its room, once it is in"
    assert (pool.figures().num_preemptions > 0) == (step < FULL.max_context), "in steps of the whole none gives way"


def use(pool: SlotPool, name: str, length: int, epoch: int, num_rows: int = 0) -> SessionSlot:
    """A call of a session whose text is its own, from arrival to answer, which takes room as `CallQueue` does."""
    tokens = [1000 * epoch + place for place in range(length)]
    rows = max(length, num_rows)
    for session in pool.to_preempt(ScopedId(name), epoch, rows):
        pool.preempt(session)
    session = pool.lease(ScopedId(name), epoch, rows, Text(tokens), most_rows=FULL.slot_rows)
    pool.commit(session, range(session.slot.length, length), tokens[session.slot.length :])
    pool.end_call(session)
    return session


def lengths(pool: SlotPool, *names: str) -> list[int]:
    """Tokens held of each."""
    held = [pool.get(ScopedId(name)) for name in names]
    return [session.slot.length if session is not None else 0 for session in held]


def test_the_youngest_session_is_preempted_first_and_from_its_end(clock: Clock) -> None:
    pool = new_pool(clock, 200)
    for number, name in enumerate("abcd"):
        use(pool, name, 50, epoch=number)
    use(pool, "b", 60, epoch=1)
    assert lengths(pool, *"abcd") == [50, 60, 50, 32], "whole blocks stay of what 10 rows are taken from"
    use(pool, "a", 90, epoch=0)
    assert lengths(pool, *"abcd") == [90, 60, 50, 0]
    assert (pool.figures().num_preemptions, pool.figures().num_evictions) == (1, 1)
    with pytest.raises(Preempted, match=r"KV memory: .* try again, or start with more --kv-memory"):
        use(pool, "d", 50, epoch=3)
    pool.check_integrity()


def test_no_session_is_preempted_in_vain_or_for_a_younger_one(clock: Clock) -> None:
    pool = new_pool(clock, 100)
    use(pool, "old", 40, epoch=1)
    grown = use(pool, "young", 40, epoch=2)
    clock.now = 50.0
    with pytest.raises(Exhausted, match="30 tokens need 240 bytes, but 160 of 800 are free"):
        use(pool, "young", 70, epoch=2)
    assert pool.to_preempt(ScopedId("old"), 1, 101) == [], "more than there is"
    assert pool.to_preempt(ScopedId("stranger"), 0, 40) == [], "who comes in pushes nobody out"
    clock.now = 100.0
    assert grown.state is SlotState.HELD, "who asks again and again keeps what it has"
    use(pool, "old", 60, epoch=1)
    pool.release(ScopedId("old"))
    assert use(pool, "young", 70, epoch=2) is grown


def test_a_preempted_session_returns_before_those_that_began_later(clock: Clock) -> None:
    pool = new_pool(clock, 100)
    use(pool, "a", 40, epoch=1)
    use(pool, "b", 50, epoch=2)
    use(pool, "a", 60, epoch=1)
    with pytest.raises(Preempted):
        use(pool, "b", 50, epoch=2)
    with pytest.raises(Exhausted, match="KV memory: 1 sessions that began earlier wait for room") as refusal:
        use(pool, "c", 10, epoch=3)
    assert not isinstance(refusal.value, Preempted), "it held nothing"
    pool.release(ScopedId("a"))
    with pytest.raises(Exhausted):
        use(pool, "c", 10, epoch=3)
    use(pool, "b", 50, epoch=2)
    use(pool, "c", 10, epoch=3)
    pool.check_integrity()


def test_a_preempted_session_without_calls_blocks_nobody(clock: Clock) -> None:
    pool = new_pool(clock, 100)
    use(pool, "a", 40, epoch=1)
    use(pool, "b", 50, epoch=2)
    use(pool, "a", 60, epoch=1)
    pool.release(ScopedId("a"))
    clock.now += ASKING_SECONDS
    assert use(pool, "c", 10, epoch=3).state is SlotState.HELD


def test_no_session_is_admitted_that_would_be_preempted_at_once(clock: Clock) -> None:
    """Otherwise its prompt is computed again and again."""
    pool = new_pool(clock, 100, step_rows=STEP)
    use(pool, "a", 40, epoch=1)
    use(pool, "b", 30, epoch=2)
    with pytest.raises(Exhausted, match="2 sessions in use hold the rest, and may grow by 16; try again"):
        use(pool, "c", 15, epoch=3)
    use(pool, "c", 14, epoch=3)


def test_a_waiting_call_ends_if_its_session_is_preempted(pool: SlotPool) -> None:
    """It gets an error, and what was computed of it is still there when it comes back."""
    calls, (old, young) = CallQueue(pool, FULL), (Caller.of(number) for number in range(2))
    young.tokens *= 5
    future: Future[VerifyResult] = Future()
    calls.admit(young.call(), future, 0)
    (job,) = calls
    pool.commit(job.session, range(20), young.tokens[:20])
    for length in range(PROMPT, FULL.max_context, STEP):
        calls.admit(
            replace(old.call(), round=length, context=Context.of(ScopedId("s0"), [1] * length, 0, PROMPT)), Future(), 0
        )
        calls.drop(ScopedId("s0"), StaleEpoch("it goes on with another"))
    with pytest.raises(Preempted, match="this session gave way to an older one"):
        future.result(0)
    assert len(calls) == 0
    assert lengths(pool, "s1") == [0]
