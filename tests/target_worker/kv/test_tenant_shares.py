"""KV of several tenants: one that holds little does not wait for the leases of one that holds much."""

from __future__ import annotations

import pytest

from bough.errors import Exhausted
from bough.protocol.ids import ScopedId
from target_worker.kv.slot_index import SessionSlot, SlotState, Text
from target_worker.kv.slot_pool import TURN_SECONDS, SlotPool
from tests.fakes.target import Clock, new_pool

ROWS, EACH = 200, 40


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> SlotPool:
    return new_pool(clock, ROWS, lease_seconds=60.0)


def turn(pool: SlotPool, name: str, epoch: int = 1) -> SessionSlot:
    """A turn of a session, from its only call to the answer."""
    session = pool.lease(ScopedId.parse(name), epoch, EACH, Text([]))
    pool.end_call(session)
    return session


def fill(pool: SlotPool, clock: Clock, *names: str) -> list[SessionSlot]:
    """Turns one after the other, whose leases fill the pool."""
    sessions = []
    for name in names:
        sessions.append(turn(pool, name))
        clock.now += 0.1
    assert pool.figures().held_bytes == pool.figures().num_bytes
    return sessions


def test_a_tenant_with_less_does_not_wait_for_leases_of_one_with_more(pool: SlotPool, clock: Clock) -> None:
    """A key with one request at a time held all KV by named sessions, and others waited for most of a minute."""
    sessions = fill(pool, clock, *(f"greedy::{number}" for number in range(5)))
    with pytest.raises(Exhausted):
        turn(pool, "other::a")
    clock.now += TURN_SECONDS
    with pytest.raises(Exhausted):
        turn(pool, "greedy::one more")
    turn(pool, "other::a")
    assert [session.state for session in sessions[1:]] == [SlotState.HELD] * 4, "the one used longest ago gives way"
    pool.check_integrity()
    turn(pool, "other::b")
    with pytest.raises(Exhausted):
        turn(pool, "other::c")
    assert pool.figures().num_held == 5, "both have their share: three and two of five"


def test_the_tenant_with_most_is_evicted_first(pool: SlotPool, clock: Clock) -> None:
    sessions = fill(pool, clock, "modest::0", "greedy::0", "greedy::1", "modest::1", "greedy::2")
    clock.now += TURN_SECONDS
    turn(pool, "new::0")
    assert [str(session.session_id) for session in sessions if session.state is SlotState.HELD] == [
        "modest::0",
        "greedy::1",
        "modest::1",
        "greedy::2",
    ]


def test_running_sessions_are_not_evicted(pool: SlotPool, clock: Clock) -> None:
    for number in range(5):
        pool.lease(ScopedId(str(number), "greedy"), 1, EACH, Text([]))
    clock.now += TURN_SECONDS
    with pytest.raises(Exhausted):
        turn(pool, "other::a")


def test_without_keys_all_leases_last(pool: SlotPool, clock: Clock) -> None:
    fill(pool, clock, *(f"s{number}" for number in range(5)))
    clock.now += TURN_SECONDS
    with pytest.raises(Exhausted):
        turn(pool, "another")
