"""An index from which nothing comes back, not even a refusal: it costs the first call its time, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest

from bough.client import Client
from bough.errors import Unavailable
from bough.protocol.generation import Resume
from bough.protocol.ids import ScopedId
from bough.registry import connection
from bough.registry.registry import Registry
from tests.fakes.fleet import Fleet
from tests.fakes.index_server import connected
from tests.fakes.streams import OPTIONS, expected, read

pytestmark = pytest.mark.slow  # running services are called
LONG_SECONDS = 600.0


@dataclass
class Hole:
    """What passes bytes on to the index until it swallows them, and counts how often it has."""

    port: int = 0
    swallows: bool = False
    swallowed: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    tasks: list[asyncio.Task[None] | None] = field(default_factory=list)


@asynccontextmanager
async def hole(url: str) -> AsyncIterator[Hole]:
    """In front of an index."""
    state = Hole()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_request: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if state.swallows:
                    state.swallowed += is_request
                else:
                    writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        state.writers += [writer, inner_writer]
        state.tasks.append(asyncio.current_task())
        await asyncio.gather(pass_on(reader, inner_writer, True), pass_on(inner_reader, writer, False))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    state.port = server.sockets[0].getsockname()[1]
    async with server:
        yield state
        for writer in state.writers:
            writer.close()
        await asyncio.gather(*filter(None, state.tasks))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls behind the stream would wait forever; calls that a request waits for have a short limit."""
    monkeypatch.setattr(connection, "TIMEOUT_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(connection, "CALL_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(connection, "SILENT_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(connection, "AWAITED_SECONDS", 0.5)


async def test_after_one_unanswered_call_others_fail_at_once(index_url: str, patient: None) -> None:
    async with hole(index_url) as state, connected(f"redis://127.0.0.1:{state.port}") as registry:
        state.swallows = True
        async with asyncio.timeout(60):
            with pytest.raises(Unavailable, match="does not answer"):
                await registry.load_session(ScopedId("s"))
            swallowed = state.swallowed
            for call in (
                registry.load_request(ScopedId("r")),
                registry.claim_session(ScopedId("s"), "me"),
                registry.sweep_expired(),
            ):
                with pytest.raises(Unavailable, match="does not answer: it was silent a moment ago"):
                    await call
        assert state.swallowed == swallowed > 0
        state.swallows = False
        async with asyncio.timeout(60):
            await registry.workers()  # a look at it finds that it is back
            assert await registry.load_session(ScopedId("nobody's")) is None


@pytest.mark.parametrize("is_resumed", [False, True], ids=["named", "resumed"])
async def test_a_request_does_not_wait_for_a_silent_index(fakes: Fleet, patient: None, is_resumed: bool) -> None:
    """A named request waited for four seconds, a resumed one for eight: each step for itself."""
    await fakes.target("t1")
    async with hole(fakes.registry.safe_url) as state:
        through = Registry(f"redis://127.0.0.1:{state.port}", fakes.namespace)
        fakes.stack.push_async_callback(through.close)
        _, server = await replace(fakes, registry=through).orchestrator()
        options = replace(OPTIONS, session_id="s", resume=Resume(0) if is_resumed else None)
        async with Client(server.address) as client, asyncio.timeout(60):
            state.swallows = True
            seen = await read(client, options)
        assert seen.token_ids == expected(fakes)
        state.swallows = False


async def test_a_start_without_an_index_names_the_setting() -> None:
    registry = Registry("redis://127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"--index-url: must be a Redis or Valkey that answers: .*127\.0\.0\.1:1"):
        await registry.wait(0.0)
    await registry.close()
