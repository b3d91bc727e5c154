"""Which workers are known, from the first moment on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from unittest.mock import AsyncMock

import pytest
from tokenizers import Tokenizer

from bough.errors import NotFound, Unavailable
from bough.protocol.generation import GenerateOptions
from bough.registry.records import WorkerLoad, WorkerRecord
from orchestrator.cluster import directory as module
from orchestrator.cluster.directory import MOST_MISSING, Directory
from orchestrator.cluster.served_models import TargetAway, targets_for
from orchestrator.cluster.worker_clients import TargetClient
from orchestrator.cluster.worker_handle import TargetHandle
from tests.fakes.fleet import FakeDraft, FakeTarget, Fleet
from tests.fakes.waiting import PATIENCE_SECONDS, until


def least_busy(directory: Directory) -> TargetHandle:
    """Of those that would serve a request without a past."""
    targets = targets_for(directory, GenerateOptions(), None, None)
    return min(targets, key=lambda target: target.busyness)


async def test_between_equals_the_one_that_all_together_keep_less_busy(fakes: Fleet) -> None:
    """What other orchestrators run is known from what workers say of themselves, at every heartbeat anew."""
    (_, first), (_, second) = await fakes.target("a"), await fakes.target("b")
    requests, _ = await fakes.orchestrator(num_targets=2)
    directory = requests.directory
    for busy, idle in (("a", "b"), ("b", "a")):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while least_busy(directory).record.worker_id != idle:
                for worker_id, used in ((busy, 80), (idle, 20)):
                    there = first.address if worker_id == "a" else second.address
                    load = WorkerLoad(kv_bytes=100, kv_used_bytes=used)
                    await fakes.registry.register(WorkerRecord("target", worker_id, there, load))
                await asyncio.sleep(0.05)


async def test_who_is_there_already_is_known_from_the_start(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an orchestrator just started would send its first requests away for want of a target."""
    monkeypatch.setattr(module, "FIRST_LOOK_SECONDS", 60.0)
    await fakes.target("early")
    directory = Directory(fakes.registry)
    async with directory.running():
        assert least_busy(directory).record.worker_id == "early"


async def test_a_worker_that_does_not_answer_holds_up_no_start(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_LOOK_SECONDS", 0.1)
    patient = asyncio.Event()

    class Silent(FakeTarget):
        async def GetServerInfo(self, request: object, context: object) -> object:
            await patient.wait()
            return await super().GetServerInfo(request, context)

    await fakes.worker(Silent("silent", fakes.tokenizer))
    directory = Directory(fakes.registry)
    async with directory.running():
        with pytest.raises(Unavailable, match="no target worker can be used: silent: has not said yet"):
            least_busy(directory)
        patient.set()
        await until(lambda: directory.has_target)
        assert least_busy(directory).record.worker_id == "silent"


async def test_a_worker_is_forgotten_when_the_index_has_not_named_it_for_a_while(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks in a row count, and not the clock: an index may be away for long and come back empty before it hears of
    the workers again, or this process may have been stopped."""
    await fakes.target("t")
    directory = Directory(fakes.registry)
    await directory._refresh()
    await asyncio.wait(directory._meetings.values())
    assert directory.has_target
    named = await fakes.registry.workers()
    for answers in ([[]] * MOST_MISSING, [named], [[]] * MOST_MISSING):
        for answer in answers:
            monkeypatch.setattr(fakes.registry, "workers", AsyncMock(return_value=answer))
            await directory._refresh()
            assert directory.has_target
    await directory._refresh()
    assert not directory.has_target


async def test_how_a_draft_differs_is_found_out_before_anybody_asks(fakes: Fleet) -> None:
    """Reading a vocabulary of 150,000 tokens takes the better part of a second, which the event loop has not."""
    await fakes.target("a")
    other = Tokenizer.from_str(fakes.tokenizer.tokenizer_json.decode())
    other.add_tokens(["another"])
    await fakes.worker(FakeDraft("b", replace(fakes.tokenizer, tokenizer_json=other.to_str().encode())))
    directory = Directory(fakes.registry)
    async with directory.running():
        await until(lambda: len(directory._everyone()) == 2)
        assert all("vocabulary" in vars(known.tokenizer.files) for known in directory._everyone())
        assert any("its tokenizer differs from a's" in status.problem for status in directory.statuses())


async def test_the_connection_to_a_worker_that_cannot_be_used_is_closed(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever could be asked, but not compared with the others, was asked again at each poll by a new connection."""
    opened, closed, close = list[TargetClient](), list[TargetClient](), TargetClient.close

    async def noted(client: TargetClient) -> None:
        closed.append(client)
        await close(client)

    async def fails(_: Directory, known: TargetHandle, others: object) -> None:
        opened.append(known.client)
        raise ZeroDivisionError

    monkeypatch.setattr(TargetClient, "close", noted)
    monkeypatch.setattr(Directory, "_read_vocabularies", fails)
    await fakes.target("odd")
    directory = Directory(fakes.registry)
    async with directory.running():
        await until(lambda: len(opened) >= 2)
        assert closed[:1] == opened[:1]
        assert not directory.has_target


async def test_a_target_is_known_to_be_usable_while_the_index_is_away(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a target that ends while the index is away has no time to come back."""
    await fakes.target("t")
    directory = Directory(fakes.registry)
    await directory._refresh()
    await asyncio.wait(directory._meetings.values())
    before = directory.last_usable(lambda _: True)
    monkeypatch.setattr(fakes.registry, "workers", AsyncMock(side_effect=Unavailable("away")))
    await directory._refresh()
    assert directory.last_usable(lambda _: True) > before


async def test_without_any_target_a_request_waits_for_the_one_that_serves_any_of_the_models(fakes: Fleet) -> None:
    """Whether it must name one is seen when they are back."""
    await fakes.target("t")
    directory = Directory(fakes.registry)
    await directory._refresh()
    await asyncio.wait(directory._meetings.values())
    handle = directory.targets[0]
    for name in "ab":
        directory._see(replace(handle, info=replace(handle.info, model_name=name, model_fingerprint=name)))
    handle.problem = "gone"
    with pytest.raises(TargetAway):
        targets_for(directory, GenerateOptions(), None, None)
    with pytest.raises(NotFound, match=r"model: must be one of 'a', 'b', .*, got 'c'"):
        targets_for(directory, GenerateOptions(model="c"), None, None)


async def test_a_target_of_another_release_is_not_waited_for(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fakes.target("t")
    monkeypatch.setattr(module, "PROTOCOL_VERSION", -1)
    directory = Directory(fakes.registry)
    await directory._refresh()
    await asyncio.wait(directory._meetings.values())
    assert "t: it speaks protocol version" in directory.why_no_target()
    assert not directory.seen


async def introduced(fakes: Fleet, *names: str) -> Directory:
    """A directory that does not poll, and knows targets of these names."""
    for name in names:
        await fakes.target(name)
    directory = Directory(fakes.registry)
    await directory._refresh()
    await asyncio.wait(directory._meetings.values())
    return directory


async def test_no_request_begins_at_a_target_that_is_about_to_be_forgotten(
    fakes: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the connection of another one was closed, it was still chosen, and then lost its own."""
    directory = await introduced(fakes, "a", "b")
    usable: list[int] = []

    async def close(self: TargetClient) -> None:
        usable.append(len(directory.targets))

    monkeypatch.setattr(TargetClient, "close", close)
    for target in directory.targets:
        target.num_missing = MOST_MISSING + 1
    await directory._forget_unlisted()
    assert usable == [0, 0]


async def test_threads_end_even_if_a_connection_cannot_be_closed(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = await introduced(fakes, "a", "b")
    closed: list[str] = []

    async def close(self: TargetClient) -> None:
        closed.append(self.address)
        raise OSError("closed already")

    monkeypatch.setattr(TargetClient, "close", close)
    with pytest.raises(OSError, match="closed already"):
        async with directory.running():
            pass
    assert len(closed) == 2
    with pytest.raises(RuntimeError, match="after shutdown"):
        await directory.tokenizing.run(lambda: None)


async def test_no_session_begins_at_a_draft_worker_that_leaves_while_another_is_there(fakes: Fleet) -> None:
    """It refuses new sessions, and had the fewest: each began with a round without guesses."""
    for name in ("a", "b"):
        await fakes.worker(FakeDraft(name, fakes.tokenizer))
    directory = await introduced(fakes, "t")
    (target,) = directory.targets
    busy, leaving = (directory._drafts[name] for name in ("a", "b"))
    busy.num_running, leaving.num_missing = 5, 2
    assert directory.draft(target, "new", "") is busy
    assert directory.draft(target, "old", "b") is leaving, "with the session's KV, for as long as it answers"
    busy.problem = "gone"
    assert directory.draft(target, "new", "") is leaving
