"""Turns that the index could not record: no orchestrator continues the turn before in their place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import AsyncMock, patch

import pytest

from bough.client import Client
from bough.errors import InvalidRequest, NotFound, Unavailable
from bough.protocol.generation import GenerateOptions, TextPrompt
from bough.protocol.ids import ScopedId
from orchestrator.serving.requests import Requests
from tests.fakes.fleet import Fleet
from tests.fakes.streams import failing, once, read
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
TURN = GenerateOptions(session_id="s", seed=3, max_tokens=8, ignore_eos=True)
NEXT = replace(TURN, continues=True)
MORE = TextPrompt(" more")
AWAY = Unavailable("the index cannot be written")
REFUSAL = "session_id: 's' cannot be continued, as its last turn is not recorded; send the full history"


@contextmanager
def cannot_record(requests: Requests) -> Iterator[None]:
    """Records of an orchestrator fail, though the index takes its claims."""
    failing = {name: AsyncMock(side_effect=AWAY) for name in ("record_session", "record_request", "drop_session")}
    requests.recorder.pauses_seconds = (0.01,) * 3
    with patch.multiple(requests.directory.registry, **failing):
        yield


async def test_an_unrecorded_turn_is_not_skipped(fakes: Fleet) -> None:
    """The next turn, here or at another orchestrator, silently continued the turn before the last one."""
    await fakes.target("t1")
    own = await fakes.with_own_client()
    (requests, first), (_, second) = await own.orchestrator(), await fakes.orchestrator()
    async with Client(first.address) as here, Client(second.address) as elsewhere:
        before = await read(here, TURN)
        with cannot_record(requests):
            lost = await read(here, NEXT, MORE)
            assert any("not recorded" in warning for warning in lost.end.warnings)
            await until(lambda: is_lost(requests))
            for client in (here, elsewhere, here):
                with pytest.raises(NotFound, match=REFUSAL):
                    await read(client, NEXT, MORE)
            recorded = await fakes.registry.load_session(ScopedId("s"))
            assert recorded is not None
            assert len(recorded.tokens) == before.started.prompt_tokens + 8
        await until(lambda: requests.recorder.until_written(ScopedId("s")))
        assert await fakes.registry.load_session(ScopedId("s")) is None, (
            "the index has forgotten what must not be continued"
        )
        with pytest.raises(NotFound, match="is not known"):
            await read(elsewhere, NEXT, MORE)
        whole = await read(elsewhere, TURN)
        following = await read(here, NEXT, MORE)
    assert following.started.prompt_tokens > whole.started.prompt_tokens + 8


def is_lost(requests: Requests) -> bool:
    """Whether the session's last turn was given up."""
    try:
        requests.recorder.unwritten(ScopedId("s"), continues=True)
    except NotFound:
        return True
    return False


async def test_a_turn_that_failed_before_its_first_round_does_not_change_the_session(fakes: Fleet) -> None:
    target, _ = await fakes.target("t1")
    (_, first), (_, second) = await fakes.orchestrator(), await fakes.orchestrator()
    async with Client(first.address) as here, Client(second.address) as elsewhere:
        before = await read(here, TURN)
        target.before = once(failing(InvalidRequest("tree", "is none")), 1)
        with pytest.raises(InvalidRequest, match="tree: is none"):
            await read(here, NEXT, MORE)

        async def is_recorded() -> bool:
            stored = await fakes.registry.stored_session(ScopedId("s"))
            return stored.record is not None and stored.epoch <= stored.record.epoch

        await until(is_recorded)
        after = await read(elsewhere, NEXT, MORE)
    assert after.started.prompt_tokens == before.started.prompt_tokens + 8 + len(MORE.text)


async def test_a_turn_running_elsewhere_is_not_skipped(fakes: Fleet) -> None:
    target, _ = await fakes.target("t1")
    (_, first), (_, second) = await fakes.orchestrator(), await fakes.orchestrator()
    gate, reached = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        reached.set()
        await gate.wait()

    async with Client(first.address) as here, Client(second.address) as elsewhere:
        await read(here, TURN)
        target.before = once(hold, 1)
        running = asyncio.create_task(read(here, NEXT, MORE))
        await reached.wait()
        with pytest.raises(NotFound, match=REFUSAL):
            await read(elsewhere, NEXT, MORE)
        gate.set()
        second_turn = await running
        third = await read(elsewhere, NEXT, MORE)
    assert third.started.prompt_tokens == second_turn.started.prompt_tokens + 8 + len(MORE.text)


async def test_nothing_is_continued_from_a_read_only_index(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other orchestrator could know that the recorded turn is not the last one any more."""
    await fakes.target("t1")
    requests, process = await fakes.orchestrator()
    async with Client(process.address, patience_seconds=0.0) as client:
        await read(client, TURN)
        monkeypatch.setattr(requests.directory.registry, "claim_session", AsyncMock(side_effect=AWAY))
        with pytest.raises(Unavailable, match="session_id: 's' cannot be continued now: the index cannot be written"):
            await read(client, NEXT, MORE)
        assert (await read(client, TURN)).token_ids, "with the full history it goes on"
