"""What a key allows: requests at once, and tokens a minute, by a clock of the test's own."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from bough.errors import Exhausted
from bough.protocol.decision import RoundTimings
from bough.protocol.generation import PromptLogprobs, Started, Tokens
from bough.security.keys import ApiKey
from orchestrator.serving.tenants import Tenant, TenantUsage

STARTED = Started("r", 1, 1, "m")


def tokens(number: int) -> Tokens:
    return Tokens((7,) * number, (False,) * number, ("",) * number, (), 0, 0, RoundTimings())


def test_requests_at_once_are_one_tenants() -> None:
    usage, key = TenantUsage(), ApiKey("alice", "0" * 64, requests=2)
    with usage.request(key), usage.request(key):
        with pytest.raises(Exhausted, match="requests: 2 of this key run") as refused, usage.request(key):
            pass
        assert refused.value.retry_seconds
        with usage.request(ApiKey("bob", "1" * 64, requests=1)):
            pass
    with pytest.raises(ValueError, match="broken"), usage.request(key):
        raise ValueError("broken")
    with usage.request(key), usage.request(key):
        pass


def test_tokens_that_were_used_are_paid_for_by_the_minutes_that_follow() -> None:
    now = [100.0]
    usage, key = TenantUsage(clock=lambda: now[0]), ApiKey("alice", "0" * 64, tokens_per_minute=60)
    with usage.request(key) as count:
        count(Started("r", 30, 1, "m"))
        count(PromptLogprobs((7,) * 30, ()))  # no further tokens
        count(tokens(90))  # what runs is not cut short
    with pytest.raises(Exhausted, match="tokens_per_minute: this key's 60 are used") as refused, usage.request(key):
        pass
    assert refused.value.retry_seconds == pytest.approx(60.0)
    now[0] += 59.0
    with pytest.raises(Exhausted), usage.request(key):
        pass
    now[0] += 1.5
    with usage.request(key) as count:
        count(tokens(30))
    now[0] += 3600.0  # time that was not used is not saved up
    with usage.request(key) as count:
        count(tokens(61))
    with pytest.raises(Exhausted), usage.request(key):
        pass


def test_of_too_many_sessions_those_unused_for_longest_are_given_up_and_none_that_is_in_use() -> None:
    usage, key = TenantUsage(), ApiKey("alice", "0" * 64, sessions=2)

    def used(name: str) -> list[str]:
        with usage.request(key, name) as count:
            count(STARTED)
            return closed()

    def closed() -> list[str]:
        names = usage.surplus(key)
        assert usage.surplus(key) == names, "what was not closed is asked for again"
        for name in names:
            usage.forget(key, name)
        return names

    assert [used(name) for name in ("a", "b", "a", "c", "", "c")] == [[], [], [], ["b"], [], []]
    with usage.request(key, "a") as first, usage.request(key, "a") as second:
        first(STARTED)
        second(STARTED)
        with usage.request(key, "x"):
            assert usage.surplus(key) == [], "it has not been let in"
        with usage.request(key, "d") as count:
            count(STARTED)
            assert closed() == ["c"]
            with pytest.raises(Exhausted, match="sessions: a request runs in each of the 2 of this key") as refused:
                used("e")
            assert refused.value.retry_seconds
            with usage.request(key), usage.request(ApiKey("bob", "1" * 64, sessions=1), "e"):
                pass
        assert used("e") == ["d"]
    usage.forget(key, "a")
    usage.forget(ApiKey("nobody", "2" * 64), "a")
    assert used("f") == []


def test_requests_that_wait_count_for_their_sessions() -> None:
    """Otherwise as many would run at once as come together, and a session would be closed under one that waits."""
    usage, key = TenantUsage(), ApiKey("alice", "0" * 64, sessions=1)
    with usage.request(key, "a") as count:
        count(STARTED)
    with usage.request(key, "a"):  # waits
        with (
            pytest.raises(Exhausted, match="sessions: a request runs in each of the 1 of this key"),
            usage.request(key, "b"),
        ):
            pass
        assert usage.surplus(key) == []
    with usage.request(key, "b"), pytest.raises(Exhausted), usage.request(key, "a"):
        pass
    with usage.request(key, "b") as count:
        count(STARTED)
        assert usage.surplus(key) == ["a"]


def test_a_session_that_was_closed_under_its_request_is_forgotten_at_its_end() -> None:
    usage, key = TenantUsage(), ApiKey("alice", "0" * 64, sessions=1)
    with usage.request(key, "a") as first:
        first(STARTED)
        usage.forget(key, "a")
        with usage.request(key, "a") as second:
            second(STARTED)
        with pytest.raises(Exhausted), usage.request(key, "b"):
            pass
    with usage.request(key, "b") as count:
        count(STARTED)
        assert usage.surplus(key) == ["a"]


async def test_a_session_in_which_a_request_begins_while_another_is_closed_is_left_alone() -> None:
    """Its request was ended, as of a session that had been given up."""
    usage, key = TenantUsage(), ApiKey("alice", "0" * 64, sessions=1)
    running, closed = ExitStack(), list[str]()

    async def close_session(name: str) -> None:
        closed.append(name)
        if len(closed) == 1:
            running.enter_context(usage.request(key, "b"))

    for name in ("a", "b", "c"):
        with usage.request(key, name) as count:
            count(STARTED)
    requests = SimpleNamespace(directory=SimpleNamespace(index_problem=""), close_session=close_session)
    with running:
        await Tenant(requests, usage, key)._close_surplus()
    assert closed == ["alice::a"]
