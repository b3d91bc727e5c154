"""The index: leases, sessions, requests and prefixes, on real servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import StaleEpoch, Unavailable
from bough.protocol.ids import ScopedId
from bough.protocol.prefix_hash import block_hashes
from bough.protocol.sampling_params import SamplingParams, StopConditions
from bough.registry import registry as registry_module
from bough.registry.records import RequestRecord, SessionRecord, WorkerLoad, WorkerRecord, pack_tokens
from bough.registry.registry import Registry, registered
from tests.fakes.index_server import SERVERS, Server, connected, served
from tests.fakes.waiting import until

WORKER = WorkerRecord("draft", "draft-1", "127.0.0.1:9", WorkerLoad(1000, 300))
SESSION = SessionRecord(ScopedId("s"), "t1", "d1", 5, 2, 2, (1, 2, 3))
REQUEST = RequestRecord(ScopedId("r"), ScopedId("s"), 5, 2, (1, 2, 3), SamplingParams(), StopConditions())


@pytest.fixture(params=SERVERS, scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(request.param, tmp_path_factory.mktemp("index")) as server:
        yield server


@pytest.fixture
async def registry(server: Server) -> AsyncIterator[Registry]:
    async with connected(server.url) as registry:
        yield registry
        server.redis.flushall()


async def until_there(registry: Registry, *workers: WorkerRecord) -> None:
    async def are_there() -> bool:
        return await registry.workers() == list(workers)

    await until(are_there)


async def test_leases_expire_by_the_servers_clock(registry: Registry) -> None:
    await registry.register(WORKER, lease_seconds=60.0)
    assert await registry.workers() == [WORKER]
    await registry.register(WORKER, lease_seconds=0.05)
    await until_there(registry)


async def test_a_registered_worker_stays_until_it_leaves_and_reports_its_load(registry: Registry) -> None:
    present = WORKER
    async with registered(registry, lambda: present, heartbeat_seconds=0.02):
        assert await registry.workers() == [WORKER]
        present = replace(WORKER, load=WorkerLoad(kv_used_bytes=7))
        await until_there(registry, present)
    assert await registry.workers() == []


async def test_a_worker_stays_after_one_failure_to_report_its_load(
    registry: Registry, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [WORKER]

    def present() -> WorkerRecord:
        return answers.pop()  # an IndexError where there is none

    async with registered(registry, present, heartbeat_seconds=0.02):
        await until(lambda: "a heartbeat failed" in caplog.text)
        answers += [WORKER] * 1000
        server.redis.flushall()
        await until_there(registry, WORKER)
    assert await registry.workers() == []


async def test_workers_return_after_the_index_lost_everything(registry: Registry, server: Server) -> None:
    async with registered(registry, lambda: WORKER):
        server.redis.flushall()
        await until_there(registry, WORKER)


async def test_sessions_are_written_in_parts_and_repetition_does_no_harm(registry: Registry) -> None:
    assert await registry.load_session(ScopedId("s")) is None
    second = replace(SESSION, draft_id="", target_length=4, tokens=(1, 2, 3, 70_000, 5))
    for record, start in ((SESSION, 0), (second, 3), (second, 3), (second, 5)):
        await registry.record_session(record, start)
        assert await registry.load_session(ScopedId("s")) == record
    shorter = SessionRecord(ScopedId("s"), "t2", "d1", 6, 1, 1, (1, 9))
    await registry.record_session(shorter, 0)
    assert await registry.load_session(ScopedId("s")) == shorter
    await registry.drop_session(ScopedId("s"), 6)
    assert await registry.load_session(ScopedId("s")) is None


async def test_an_outdated_write_changes_nothing(registry: Registry) -> None:
    """A paused index may get to a write after the client has given it up and sent the next on another connection."""
    later = replace(SESSION, tokens=(1, 2, 3, 4))
    await registry.record_session(later, 0)
    await registry.record_session(SESSION, 0)
    assert await registry.load_session(ScopedId("s")) == later
    ended = replace(REQUEST, finish_reason="stop")
    await registry.record_request(ended, 0)
    await registry.record_request(REQUEST, 0)
    assert await registry.load_request(ScopedId("r")) == ended


async def test_a_lost_or_foreign_transcript_is_sent_completely(registry: Registry, server: Server) -> None:
    longer = replace(SESSION, tokens=(1, 2, 3, 4))
    await registry.record_session(longer, 3)  # there was nothing
    assert await registry.load_session(ScopedId("s")) == longer
    other = replace(SESSION, epoch=6, tokens=(7, 8, 9, 10, 11))
    await registry.record_session(other, 3)  # there were three, of another epoch
    assert await registry.load_session(ScopedId("s")) == other
    server.redis.delete("{bough}:session-tokens:s")
    assert await registry.load_session(ScopedId("s")) is None
    await registry.record_session(other, 5)
    assert await registry.load_session(ScopedId("s")) == other


async def test_claims_grow_and_fence_older_ones(registry: Registry) -> None:
    first = await registry.claim_session(ScopedId("s"), "a")
    assert first.record is None
    assert first.epoch > 1_700_000_000_000_000, "microseconds of the server's clock"
    mine = replace(SESSION, epoch=first.epoch)
    await registry.record_session(mine, 0)
    second = await registry.claim_session(ScopedId("s"), "b")
    assert second.epoch > first.epoch
    assert second.record == mine
    for refused in (registry.record_session(mine, 3), registry.drop_session(ScopedId("s"), first.epoch)):
        with pytest.raises(StaleEpoch, match="session s"):
            await refused
    assert await registry.load_session(ScopedId("s")) == mine
    await registry.record_session(replace(mine, epoch=second.epoch + 10), 0)  # by a clock that is ahead of the server's
    assert (await registry.claim_session(ScopedId("s"), "c")).epoch > second.epoch + 10
    await registry.close_session(ScopedId("s"))
    assert (await registry.claim_session(ScopedId("s"), "d")).record is None


async def test_a_claim_after_another_is_refused_if_a_third_came_between(registry: Registry, server: Server) -> None:
    mine = (await registry.claim_session(ScopedId("s"), "a")).epoch
    again = (await registry.claim_session(ScopedId("s"), "a", mine)).epoch
    assert again > mine
    with pytest.raises(StaleEpoch, match="session s"):
        await registry.claim_session(ScopedId("s"), "a", mine)
    server.redis.flushall()
    assert (await registry.claim_session(ScopedId("s"), "a", again)).epoch > again


async def test_a_claim_whose_answer_was_lost_is_answered_the_same(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the client's second try would find the session taken, by its first."""
    before = (await registry.claim_session(ScopedId("s"), "a")).epoch
    monkeypatch.setattr("secrets.token_hex", lambda _: "same")
    first = await registry.claim_session(ScopedId("s"), "a", before)
    assert await registry.claim_session(ScopedId("s"), "a", before) == first
    await registry.record_session(replace(SESSION, epoch=first.epoch), 0)
    assert (await registry.claim_session(ScopedId("s"), "a")).epoch == first.epoch
    await registry.record_session(replace(SESSION, epoch=first.epoch + 1), 0)
    assert (await registry.claim_session(ScopedId("s"), "a")).epoch > first.epoch + 1, "that epoch is somebody else's"


async def test_one_of_many_concurrent_claims_remains(registry: Registry) -> None:
    claims = await asyncio.gather(*(registry.claim_session(ScopedId("s"), f"holder {i}") for i in range(100)))
    epochs = [claim.epoch for claim in claims]
    assert len(set(epochs)) == 100
    results = await asyncio.gather(
        *(registry.record_session(replace(SESSION, epoch=epoch), 0) for epoch in epochs), return_exceptions=True
    )
    assert [epoch for epoch, result in zip(epochs, results, strict=True) if result is None] == [max(epochs)]
    assert {type(result) for result in results} == {type(None), StaleEpoch}


STEPS = st.lists(
    st.tuples(st.sampled_from(["claim", "record", "late", "drop", "flush"]), st.integers(0, 1), st.integers(0, 8)),
    max_size=25,
)


@given(STEPS)
def test_the_index_only_contains_what_was_written(server: Server, steps: list[tuple[str, int, int]]) -> None:
    """Two holders claim, write, repeat old writes and drop, and it may be flushed: what is loaded is always the newest
    write of the newest epoch that was accepted, whole."""
    asyncio.run(_check_two_holders(server, steps))


async def _check_two_holders(server: Server, steps: list[tuple[str, int, int]]) -> None:
    epochs = [1, 2]
    written: list[SessionRecord] = []
    granted, held = 0, None
    async with connected(server.url) as registry:
        server.redis.flushall()
        for step, holder, number in steps:
            epoch = epochs[holder]
            if step == "claim":
                claim = await registry.claim_session(ScopedId("s"), str(holder))
                assert claim.record == held
                assert claim.epoch > granted
                epochs[holder] = granted = claim.epoch
            elif step == "flush":
                server.redis.flushall()
                granted, held = 0, None
            elif step == "drop" and granted <= epoch:
                await registry.drop_session(ScopedId("s"), epoch)
                granted, held = epoch + 1 if granted else 0, None  # what was there cannot be written any more
            elif step in ("record", "late"):
                if step == "record" or not written:
                    length = 1 + sum(record.epoch == epoch for record in written)
                    written.append(
                        SessionRecord(ScopedId("s"), f"t{holder}", "", epoch, 0, 0, (epoch % 1000,) * length)
                    )
                    record = written[-1]
                else:
                    record = written[number % len(written)]
                writing = registry.record_session(record, min(number, len(record.tokens)))
                if granted > record.epoch:
                    with pytest.raises(StaleEpoch):
                        await writing
                    continue
                await writing
                granted = max(granted, record.epoch)
                if held is None or held.epoch != record.epoch or len(held.tokens) <= len(record.tokens):
                    held = record
            assert await registry.load_session(ScopedId("s")) == held


async def test_requests_store_all_that_is_needed_to_continue(registry: Registry) -> None:
    assert await registry.load_request(ScopedId("r")) is None
    sampling = SamplingParams(0.7, 3, 0.9, 0.1, 2**64 - 1, 1.1, 0.5, -0.5, {7: -1.5, 0: 2.0}, 4, frozenset({261, 2}))
    running = replace(REQUEST, sampling=sampling, stops=StopConditions(77, ("\n\n", "ü")))
    await registry.record_request(running, 0)
    assert await registry.load_request(ScopedId("r")) == running
    ended = replace(running, tokens=(1, 2, 3, 4, 5), finish_reason="stop", stop_reason="ü")
    await registry.record_request(ended, 3)
    assert await registry.load_request(ScopedId("r")) == ended
    await registry.record_request(replace(ended, epoch=6), 5)
    with pytest.raises(StaleEpoch):
        await registry.record_request(ended, 5)


async def test_prefixes_are_those_of_live_workers_with_the_same_model(registry: Registry) -> None:
    hashes = block_hashes(range(32 * 6))
    for worker_id in ("a", "b", "c"):
        await registry.register(WorkerRecord("target", worker_id, "h:1"), lease_seconds=30)
    await registry.note_prefixes("m", hashes[:4], "a")
    await registry.note_prefixes("m", hashes[:2], "b")
    await registry.note_prefixes("other", hashes, "c")
    await registry.note_prefixes("m", hashes, "not registered")
    everyone = ["c", "a", "not registered", "b"]
    assert await registry.find_prefixes("m", hashes, everyone) == {"a": 4, "b": 2}
    assert await registry.find_prefixes("m", hashes[:2], everyone) == {"a": 2, "b": 2}
    assert await registry.find_prefixes("m", hashes[:1], ["b"]) == {"b": 1}
    assert await registry.find_prefixes("m", block_hashes(range(1, 33)), everyone) == {}
    assert await registry.find_prefixes("m", [], everyone) == {}
    assert await registry.find_prefixes("m", hashes, []) == {}
    await registry.deregister("a")
    assert await registry.find_prefixes("m", hashes, everyone) == {"b": 2}


async def test_prefixes_expire_with_the_lease_and_are_renewed_with_it(registry: Registry, server: Server) -> None:
    worker, hashes = WorkerRecord("target", "a", "h:1"), block_hashes(range(64))
    await registry.register(worker, lease_seconds=30)
    await registry.note_prefixes("m", hashes, "a")
    assert 20_000 < server.redis.pttl("{bough}:prefixes:a") <= 30_000
    await registry.register(worker, lease_seconds=60)
    assert 50_000 < server.redis.pttl("{bough}:prefixes:a") <= 60_000
    assert await registry.find_prefixes("m", hashes, ["a"]) == {"a": 2}
    await registry.register(worker, lease_seconds=0.05)
    await asyncio.sleep(0.2)
    assert await registry.find_prefixes("m", hashes, ["a"]) == {}
    await registry.register(worker, lease_seconds=60)
    assert await registry.find_prefixes("m", hashes, ["a"]) == {}, "a worker that comes back may hold nothing"


async def test_of_too_many_prefixes_the_oldest_are_removed(
    registry: Registry, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "MAX_PREFIXES", 8)
    old, new = block_hashes(range(32 * 6)), block_hashes(range(1, 1 + 32 * 5))
    await registry.register(WorkerRecord("target", "a", "h:1"), lease_seconds=60)
    for hashes in (old, new):
        await registry.note_prefixes("m", hashes, "a")
        await asyncio.sleep(0.01)
    assert server.redis.zcard("{bough}:prefixes:a") == 8
    assert await registry.find_prefixes("m", new, ["a"]) == {"a": 5}
    assert await registry.find_prefixes("m", old, ["a"]) == {"a": 3}, "the last blocks of a text go first"


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=5), st.lists(st.integers(0, 1), max_size=6))
def test_the_longest_prefix_is_found(server: Server, held: list[list[int]], wanted: list[int]) -> None:
    asyncio.run(_check_longest_prefix(server, held, wanted))


async def _check_longest_prefix(server: Server, held: list[list[int]], wanted: list[int]) -> None:
    def hashes(blocks: list[int]) -> list[int]:
        return block_hashes([block for block in blocks for _ in range(32)])

    def common(blocks: list[int]) -> int:
        pairs = zip(blocks, wanted, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(blocks), len(wanted)))

    async with connected(server.url) as registry:
        server.redis.flushall()
        for number, blocks in enumerate(held):
            worker_id = f"t{number % 3}"
            await registry.register(WorkerRecord("target", worker_id, "h:1"), lease_seconds=60)
            await registry.note_prefixes("m", hashes(blocks), worker_id)
        longest: dict[str, int] = {}
        for number, blocks in enumerate(held):
            longest[f"t{number % 3}"] = max(longest.get(f"t{number % 3}", 0), common(blocks))
        found = await registry.find_prefixes("m", hashes(wanted), ["t0", "t1", "t2"])
        assert found == {worker_id: number for worker_id, number in longest.items() if number}


async def test_a_long_prefix_is_found_wherever_it_ends(registry: Registry) -> None:
    hashes = block_hashes(range(32 * 1000))
    await registry.register(WorkerRecord("target", "a", "h:1"), lease_seconds=60)
    for length in (1, 255, 256, 257, 744, 745, 1000):
        await registry.note_prefixes("m", hashes[:length], "a")
        assert await registry.find_prefixes("m", hashes, ["a"]) == {"a": length}


async def test_a_sweep_removes_only_expired_entries(registry: Registry, server: Server) -> None:
    dead, alive = WorkerRecord("target", "dead", "h:1"), WorkerRecord("target", "alive", "h:1", WorkerLoad(1))
    hashes = block_hashes(range(64))
    for worker in (dead, alive):
        await registry.register(worker, lease_seconds=60)
        await registry.note_prefixes("m", hashes, worker.worker_id)
    server.redis.zadd("{bough}:workers:leases", {"dead": 1})  # it ran out long ago
    assert await registry.workers() == [alive]
    assert await registry.find_prefixes("m", hashes, ["dead", "alive"]) == {"alive": 2}
    assert await registry.sweep_expired() == 1
    assert await registry.sweep_expired() == 0
    assert server.redis.hkeys("{bough}:workers:records") == [b"alive"]
    assert await registry.find_prefixes("m", hashes, ["dead", "alive"]) == {"alive": 2}


async def test_every_entry_expires(registry: Registry, server: Server) -> None:
    await registry.register(WORKER, lease_seconds=60)
    await registry.note_prefixes("m", block_hashes(range(64)), WORKER.worker_id)
    await registry.claim_session(ScopedId("claimed"), "a")
    for name in ("recorded", "claimed again"):
        await registry.record_session(replace(SESSION, session_id=ScopedId(name)), 0)
    await registry.claim_session(ScopedId("claimed again"), "a")
    await registry.record_request(REQUEST, 0)
    await registry.record_request(replace(REQUEST, request_id=ScopedId("ended"), finish_reason="stop"), 0)
    keys = server.redis.keys("*")
    assert len(keys) == 4 + 1 + 2 * 2 + 2 * 2 + 2 * 2  # workers, a claim, sessions, requests, ledgers
    await registry.drop_session(ScopedId("recorded"), SESSION.epoch)
    await registry.close_session(ScopedId("claimed again"))
    for key in server.redis.keys("*"):
        assert 0 < server.redis.pttl(key) <= 24 * 3600 * 1000, key


async def test_namespaces_are_separate(registry: Registry, server: Server) -> None:
    other = Registry(server.url, "other")
    await other.register(WORKER, lease_seconds=60)
    await other.record_session(SESSION, 0)
    assert await registry.workers() == []
    assert await registry.load_session(ScopedId("s")) is None
    await other.close()


async def test_a_script_is_sent_again_after_the_server_forgot_it(registry: Registry, server: Server) -> None:
    await registry.record_session(SESSION, 0)
    server.redis.script_flush()
    assert await registry.load_session(ScopedId("s")) == SESSION


@pytest.mark.parametrize("name", SERVERS)
async def test_a_running_session_returns_with_its_next_record_after_a_restart(name: str, tmp_path: Path) -> None:
    with served(name, tmp_path) as server:
        async with connected(server.url) as registry:
            await registry.record_session(SESSION, 0)
            server.process.kill()
            server.process.wait()
            with pytest.raises(Unavailable, match=r"the index at redis://127\.0\.0\.1"):
                await registry.load_session(ScopedId("s"))
            with served(name, tmp_path, port=server.port):
                await registry.wait()
                assert await registry.load_session(ScopedId("s")) is None
                longer = replace(SESSION, tokens=(1, 2, 3, 4))
                await registry.record_session(longer, 3)
                assert await registry.load_session(ScopedId("s")) == longer


async def test_a_call_can_be_cancelled_at_any_moment(registry: Registry) -> None:
    """One in five was swallowed (see `bough.concurrency.tasks.cancellable`): such a heartbeat continued forever."""

    async def go_on() -> None:
        while True:
            await registry.workers()

    for turn in range(200):
        task = asyncio.create_task(go_on())
        await asyncio.sleep(turn % 20 * 5e-5)
        task.cancel()
        await asyncio.wait({task}, timeout=10)
        assert task.cancelled()


def test_a_number_too_large_for_a_float_makes_a_record_malformed() -> None:
    stored, tokens = REQUEST.to_json(), pack_tokens(REQUEST.tokens)
    assert RequestRecord.from_json(ScopedId("r"), stored.encode(), tokens) == REQUEST
    huge = json.loads(stored)
    huge["sampling"]["temperature"] = 10**400
    assert RequestRecord.from_json(ScopedId("r"), json.dumps(huge).encode(), tokens) is None


def test_a_record_stores_ids_as_text() -> None:
    record = replace(REQUEST, session_id=ScopedId("s::1", "alice"))
    stored = json.loads(record.to_json())
    assert stored["session_id"] == "alice::s::1"
    data = json.dumps(stored).encode()
    assert RequestRecord.from_json(REQUEST.request_id, data, pack_tokens(REQUEST.tokens)) == record
