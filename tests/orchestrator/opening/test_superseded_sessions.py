"""Who has a session where several orchestrators, a flushed index and clocks that differ may each claim it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import redis.asyncio

from bough.client import Client
from bough.errors import NotFound, StaleEpoch, Unavailable
from bough.protocol.generation import Resume
from bough.protocol.ids import ScopedId
from bough.protocol.messages import VerifyCall
from orchestrator.serving.requests import Requests
from tests.fakes.fleet import FakeTarget, Fleet, Process
from tests.fakes.streams import OPTIONS, expected, once, read, read_rounds
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
KEPT = replace(OPTIONS, session_id="s")
HOUR_US = 3600 * 1_000_000


async def close(client: Client) -> bool:
    """Whether the session was known."""
    try:
        await client.close_session("s")
    except NotFound:
        return False
    return True


def gated(gate: asyncio.Event, from_call: int) -> Callable[[VerifyCall], Awaitable[None]]:
    """Holds up one call to verify, and the later ones until it continues."""
    num_calls = 0

    async def hook(call: VerifyCall) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls >= from_call:
            await gate.wait()

    return hook


@pytest.mark.parametrize("has_written", [True, False], ids=["after rounds", "in its first round"])
async def test_a_session_closed_at_another_orchestrator_ends_there(fakes: Fleet, has_written: bool) -> None:
    """The entry that fences was deleted, and the stream's next record brought the session back.

    The stream gives back its KV, which otherwise stayed leased for a minute.
    """
    target, _ = await fakes.target("t1")
    (_, first), (_, second) = await fakes.orchestrator(), await fakes.orchestrator()
    gate = asyncio.Event()
    target.before = gated(gate, 5 if has_written else 1)
    async with Client(first.address) as runs, Client(second.address) as closes:
        running = asyncio.create_task(read(runs, KEPT))
        if has_written:
            await until(lambda: fakes.registry.load_session(ScopedId("s")))
        await until(lambda: close(closes))
        assert not await close(closes), "it is closed already"
        gate.set()
        with pytest.raises(StaleEpoch):
            await asyncio.wait_for(running, 20)
        await until(lambda: not target.held)
        assert await fakes.registry.load_session(ScopedId("s")) is None
        with pytest.raises(NotFound, match="session_id: 's' is not known"):
            await read(closes, replace(KEPT, request_id="next", continues=True))
        again = await read(closes, replace(KEPT, request_id="anew"))
        assert again.token_ids == expected(fakes)
        assert await fakes.registry.load_session(ScopedId("s")) is not None, "a new session of that name is recorded"


async def test_a_request_id_shared_by_clients_of_two_orchestrators_leaves_both_sessions_recorded(fakes: Fleet) -> None:
    """The recording of the older one ended without a word, and its next turn stood on half of its text."""
    target, _ = await fakes.target("t1")
    (_, first), (_, second) = await fakes.orchestrator(), await fakes.orchestrator()
    gate = asyncio.Event()
    async with Client(first.address) as one, Client(second.address) as other:
        target.before = gated(gate, 4)
        older = asyncio.create_task(read(one, replace(OPTIONS, session_id="older")))
        await until(lambda: fakes.registry.load_request(ScopedId("r")))
        gate.set()
        target.before = once(_nothing, 1)
        newer = await read(other, replace(OPTIONS, session_id="newer"))
        whole = await older
    sessions = [await fakes.registry.load_session(ScopedId(name)) for name in ("older", "newer")]
    lengths = [len(session.tokens) for session in sessions if session is not None]
    assert lengths == [whole.started.prompt_tokens + 60, newer.started.prompt_tokens + 60]


async def _nothing() -> None:
    """No fault."""


async def test_resuming_without_the_sessions_name_keeps_the_session(fakes: Fleet) -> None:
    """A client that lost its stream knows the request; the session that it had named was deleted at its end."""
    target, _ = await fakes.target("t1")
    (_, first), (_, second) = await fakes.orchestrator(), await fakes.orchestrator()
    async with Client(first.address) as one, Client(second.address) as other:
        begun = await read_rounds(one, 4, KEPT)
        rest = await read(other, replace(OPTIONS, resume=Resume(len(begun.token_ids), tuple(begun.token_ids))))
        assert begun.token_ids + rest.token_ids == expected(fakes)
        session = await fakes.registry.load_session(ScopedId("s"))
        assert session is not None
        assert len(session.tokens) == rest.started.prompt_tokens + 60
        assert target.released == []
        alone = replace(OPTIONS, request_id="alone")
        begun = await read_rounds(one, 4, alone)
        await read(other, replace(alone, resume=Resume(len(begun.token_ids), tuple(begun.token_ids))))
        # Of a request that names no session nothing is kept. Its first stream may end before or after the second began.
        await until(lambda: [*target.held] == ["s"])


async def ahead(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeTarget, Process, Requests]:
    """A session that its target knows by the epoch of a clock one hour ahead, and of which the index knows nothing."""
    target, _ = await fakes.target("t1")
    requests, server = await fakes.orchestrator()
    clock = time.time_ns
    with monkeypatch.context() as patched:
        patched.setattr(time, "time_ns", lambda: clock() + 1000 * HOUR_US)
        patched.setattr(fakes_registry(requests), "claim_session", _away)
        async with Client(server.address) as client:
            await read(client, replace(KEPT, request_id="before"))
    await fakes.registry.close_session(ScopedId("s"))
    await flush(fakes)
    return target, server, requests


def fakes_registry(requests: Requests) -> object:
    return requests.directory.registry


async def _away(*args: object) -> None:
    raise Unavailable("the index is away")


async def flush(fakes: Fleet) -> None:
    """Of this test's namespace alone."""
    async with redis.asyncio.from_url(fakes.registry.safe_url) as client:
        for key in await client.keys(f"{{{fakes.namespace}}}:*".replace("[", "\\[")):
            await client.delete(key)


async def test_an_epoch_of_a_fast_clock_is_overtaken_after_a_flush(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request of the session was ABORTED for as long as the clock had been ahead."""
    target, _, _ = await ahead(fakes, monkeypatch)
    old = target.epochs["s"]
    assert old > time.time_ns() // 1000 + HOUR_US // 2
    _, other = await fakes.orchestrator()
    async with Client(other.address) as client:
        assert (await read(client, KEPT)).token_ids == expected(fakes)
    assert target.epochs["s"] > old
    record = await fakes.registry.load_session(ScopedId("s"))
    assert record is not None
    assert record.epoch == target.epochs["s"], "the index has learnt it"
    assert len(record.tokens) > 60


async def test_an_epoch_of_a_fast_clock_is_not_overtaken_by_a_superseded_request(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _, _ = await ahead(fakes, monkeypatch)
    _, other = await fakes.orchestrator()

    async def claimed() -> None:
        await fakes.registry.claim_session(ScopedId("s"), "somebody else")

    target.before = once(claimed, 1)
    async with Client(other.address) as client:
        with pytest.raises(StaleEpoch, match="is over"):
            await read(client, KEPT)
