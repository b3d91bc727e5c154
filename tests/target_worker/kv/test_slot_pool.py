"""Slots: leases by need, growth, eviction, and what is kept for others to begin from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import Exhausted, NotFound
from bough.model.kv.arena import Arena
from bough.model.kv.session_kv import KVArena, KVSlot
from bough.protocol.ids import ScopedId
from target_worker.kv import slot_index
from target_worker.kv.slot_index import SessionSlot, SlotState, Text
from target_worker.kv.slot_pool import SlotPool
from tests.fakes.target import CPU, SHAPE, Clock, new_pool

ROWS = 200


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> SlotPool:
    return new_pool(clock, ROWS, lease_seconds=10.0)


def write(pool: SlotPool, session: SessionSlot, tokens: list[int]) -> None:
    """Computes and commits tokens: keys and values that a reader can recognise."""
    begin = session.slot.length
    for place, token in enumerate(tokens, begin):
        session.slot.keys[0, place], session.slot.values[0, place] = token, -token
    pool.commit(session, range(begin, begin + len(tokens)), tokens)


def use(pool: SlotPool, name: str, tokens: list[int], num_rows: int = 0, epoch: int = 1) -> SessionSlot:
    """A call from its arrival to its answer."""
    session = pool.lease(ScopedId(name), epoch, max(num_rows, len(tokens)), Text(tokens))
    write(pool, session, tokens[session.slot.length :])
    pool.end_call(session)
    return session


def text(length: int, start: int = 0) -> list[int]:
    return [*range(start, start + length)]


def require_spelled(session: SessionSlot) -> None:
    slot = session.slot
    assert slot.keys[0, : slot.length, 0, 0].tolist() == slot.tokens
    assert slot.values[0, : slot.length, 0, 0].tolist() == [-token for token in slot.tokens]


@given(
    st.lists(
        st.tuples(st.sampled_from("ccccrgt"), st.integers(0, 5), st.integers(0, 2), st.integers(1, 120)), max_size=40
    )
)
def test_slots_are_consistent_after_any_operations(steps: list[tuple[str, int, int, int]]) -> None:
    """Calls, releases, callers that go and passing time, in any order: the integrity check holds after each, every
    session's keys are those of its own text, and a session whose lease runs keeps what it holds."""
    clock = Clock()
    pool = SlotPool(KVArena(SHAPE, SHAPE.empty(ROWS, CPU)), 10.0, clock)
    leased: dict[str, float] = {}
    for kind, who, family, length in steps:
        name = f"s{who}"
        try:
            if kind == "c":
                tokens = [*text(min(length, 70), 1000 * family), *text(max(0, length - 70), 10_000 * (who + 1))]
                require_spelled(use(pool, name, tokens))
                leased[name] = clock.now + 10.0
            elif kind == "r":
                leased.pop(name, None)
                pool.release(ScopedId(name))
            elif kind == "g" and (session := pool.get(ScopedId(name))) is not None:
                pool.lease(ScopedId(name), session.epoch, 1, Text([*session.slot.tokens]))
                pool.end_lease(session)
                leased.pop(name, None)
            else:
                clock.now += length / 8
        except (Exhausted, NotFound):
            pass
        pool.check_integrity()
        for name, until in leased.items():
            held = pool.get(ScopedId(name))
            assert held is not None or clock.now >= until, "a session lost its slot before its lease was over"
            if held is not None:
                require_spelled(held)
    figures = pool.figures()
    assert figures.num_sessions == len(pool)
    assert figures.held_bytes + figures.idle_bytes <= figures.num_bytes


def test_sessions_get_no_more_rows_than_they_need(pool: SlotPool) -> None:
    for number in range(10):
        use(pool, f"s{number}", text(20, 100 * number))
    with pytest.raises(Exhausted, match="20 tokens need 160 bytes, but 0 of 1600 are free; 10 sessions"):
        use(pool, "one more", text(20, 5000))
    assert pool.figures().num_held == 10


def test_a_session_that_needs_more_rows_gets_them_with_its_content(pool: SlotPool) -> None:
    first = use(pool, "a", text(20))
    use(pool, "b", text(20, 100))
    use(pool, "a", text(150))
    assert (first.slot.num_rows, first.slot.tokens) == (150, text(150))
    require_spelled(first)
    with pytest.raises(Exhausted, match="31 tokens need 248 bytes, but 240 of 1600 are free"):
        use(pool, "a", text(181))
    assert first.slot.tokens == text(150), "who is refused keeps what it has"


def test_the_longest_idle_slot_is_evicted_first_and_none_with_a_lease(pool: SlotPool, clock: Clock) -> None:
    for number, name in enumerate("abcd"):
        clock.now = float(number)
        use(pool, name, text(50, 100 * number))
    clock.now = 11.5
    use(pool, "new", text(50, 7000))
    assert [name for name in ("a", "b", "c", "d", "new") if pool.get(ScopedId(name))] == ["b", "c", "d", "new"]
    assert pool.figures().num_evictions == 1
    clock.now = 12.1
    with pytest.raises(Exhausted):
        use(pool, "more", text(150, 8000))
    assert pool.get(ScopedId("b")) is not None, "who would be evicted in vain stays"


def test_an_idle_session_gives_up_unused_rows_before_tokens(pool: SlotPool, clock: Clock) -> None:
    use(pool, "a", text(40), num_rows=150)
    clock.now = 11.0
    use(pool, "b", text(150, 1000))
    held = pool.get(ScopedId("a"))
    assert held is not None
    assert held.slot.tokens == text(40)
    assert held.slot.num_rows == 40


def test_a_slot_whose_copy_failed_does_not_stay_in_use(
    pool: SlotPool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call had failed, and counted as running: its room stayed occupied."""
    use(pool, "a", text(64))
    with monkeypatch.context() as patched:
        patched.setattr(KVSlot, "fork", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pool.lease(ScopedId("b"), 1, 100, Text(text(100)))
    clock.now += 20.0
    use(pool, "c", text(ROWS, 1000))
    pool.check_integrity()


def test_a_session_without_a_caller_is_idle_at_once(pool: SlotPool) -> None:
    session = pool.lease(ScopedId("a"), 1, ROWS, Text(text(5)))
    with pytest.raises(Exhausted):
        use(pool, "b", text(60, 1000))
    pool.end_lease(session)
    assert session.state is SlotState.IDLE
    use(pool, "b", text(60, 1000))


def test_nobody_can_guess_anothers_prompt_token_by_token(clock: Clock) -> None:
    """A guess that is right for 33 or for 63 tokens gets the same answer as one that is right for 32."""
    secret, reached = text(90), []
    for num_right in range(91):
        pool = new_pool(clock, 400)
        use(pool, "victim", secret)
        if num_right % 2:
            pool.release(ScopedId("victim"))
        guess = [*secret[:num_right], *text(95 - num_right, 3000)]
        reached.append(pool.lease(ScopedId("stranger"), 1, 120, Text(guess)).slot.length)
    assert reached == [num_right // 32 * 32 for num_right in range(91)]


def test_a_sessions_own_text_is_compared_token_by_token(pool: SlotPool) -> None:
    use(pool, "a", text(70))
    session = pool.lease(ScopedId("a"), 1, 100, Text([*text(50), 999, 998]))
    assert session.slot.tokens == text(50)


def test_a_session_prefers_its_own_slot_if_that_has_more_tokens(clock: Clock) -> None:
    pool = new_pool(clock, 400)
    use(pool, "a", text(60))
    own = use(pool, "b", [*text(60), 500, 501, 502])
    pool.lease(ScopedId("b"), 1, 70, Text([*text(60), 500, 501, 7]))
    assert own.slot.tokens == [*text(60), 500, 501]
    pool.end_call(own)
    use(pool, "c", [*text(40), *text(60, 3000)])
    pool.lease(ScopedId("b"), 1, 110, Text([*text(40), *text(60, 3000), 1]))
    assert own.slot.tokens == [*text(40), *text(56, 3000)], "and another's where that is"
    require_spelled(own)


def test_a_released_sessions_tokens_are_reused_by_its_next_turn(pool: SlotPool) -> None:
    first = use(pool, "a", text(120))
    pool.release(ScopedId("a"))
    assert (len(pool), pool.figures().num_tokens) == (0, 120)
    second = use(pool, "b", text(160))
    assert second.slot is first.slot, "without a copy: there would not be room for one"
    require_spelled(second)


def test_a_released_sessions_tokens_are_kept_for_sessions_that_need_fewer_of_them(pool: SlotPool) -> None:
    use(pool, "a", text(80))
    pool.release(ScopedId("a"))
    other = pool.lease(ScopedId("b"), 1, 60, Text([*text(40), 999]))
    assert other.slot.tokens == text(32)
    assert pool.figures().num_tokens == 80 + 32


def test_a_source_slot_is_taken_over_if_there_is_no_room_for_a_copy(pool: SlotPool, clock: Clock) -> None:
    use(pool, "a", text(120))
    clock.now = 11.0
    session = pool.lease(ScopedId("b"), 1, 150, Text([*text(100), *text(40, 3000)]))
    assert session.slot.tokens == text(96)
    assert pool.get(ScopedId("a")) is None
    require_spelled(session)
    pool.end_call(session)
    pool.check_integrity()


def test_slot_states_only_change_along_allowed_transitions(pool: SlotPool) -> None:
    session = use(pool, "a", text(5))
    with pytest.raises(AssertionError, match="a slot that is held cannot become free"):
        session.become(SlotState.FREE)


def test_ended_sessions_leave_nothing(pool: SlotPool, clock: Clock) -> None:
    """Those that went before anything was computed for them once stayed for good, with no rows to be evicted for."""
    for number in range(600):
        session = pool.lease(ScopedId(f"s{number}"), 1, 60, Text(text(5, number)))
        match number % 3:
            case 0:
                pool.end_call(session)
                clock.now += 10.0
            case 1:
                pool.end_lease(session)
            case 2:
                pool.release(ScopedId(f"s{number}"))
    pool.check_integrity()
    figures = pool.figures()
    assert len(pool) <= figures.num_held + figures.num_idle <= ROWS // 60


def test_of_too_many_idle_slots_the_longest_unused_are_removed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there is room: each looks at all of them, so that a worker became slower with every short request."""
    monkeypatch.setattr(slot_index, "MAX_IDLE", 20)
    pool = SlotPool(Arena(10_000, 1), 10.0, clock)
    for number in range(50):
        clock.now += 1.0
        name, tokens = f"s{number}", text(40, 1000 * number)
        session = pool.lease(ScopedId(name), 1, len(tokens), Text(tokens))
        pool.commit(session, range(len(tokens)), tokens)
        pool.end_call(session)
        if number % 2:
            pool.release(ScopedId(name))
        if number == 30:
            twelfth = pool.lease(ScopedId("s12"), 1, 40, Text(text(40, 12_000)))  # which is younger than others then
            assert twelfth.slot.length == 40
            pool.end_call(twelfth)
    pool.check_integrity()
    figures = pool.figures()
    assert figures.num_held + figures.num_idle < 35
    assert figures.num_evictions > 15
    assert pool.get(ScopedId("s12")) is not None
    assert pool.get(ScopedId("s2")) is None
    latest = pool.lease(ScopedId("again"), 1, 40, Text(text(40, 49_000)))
    assert latest.slot.length == 32, "texts that were used last are found"


def test_a_session_whose_slot_is_lost_on_return_gets_another_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_index, "MAX_IDLE", 1)
    pool = SlotPool(Arena(10_000, 1), 10.0, clock)
    for name in ("idle", "lapsing"):
        session = pool.lease(ScopedId(name), 1, 40, Text(text(40, 1000 if name == "idle" else 2000)))
        pool.commit(session, range(40), [*session.slot.tokens, *range(40)])
        pool.end_call(session)
        if name == "idle":
            pool.end_lease(session)
    clock.now += 20.0  # with the next lease that of "lapsing" ends too, and "idle" is one too many
    session = pool.lease(ScopedId("idle"), 1, 40, Text(text(40, 1000)))
    assert session.state is SlotState.HELD
    assert session.slot.num_rows == 40
    pool.end_call(session)
    pool.check_integrity()


def test_integrity_is_checked_less_often_with_more_slots(clock: Clock) -> None:
    arena = Arena(10_000, 1)
    pool = SlotPool(arena, 10.0, clock)
    for number in range(100):
        pool.lease(ScopedId(f"s{number}"), 1, 40, Text(text(5, 1000 * number)))
        pool.check_now_and_then()
    assert [arena.is_check_due() for _ in range(8)].count(True) == 2
