"""Replicas start a program that has ended again, once in a while; what comes from Serve's proxy waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

pytest.importorskip("ray")

from bough.errors import ConfigError, Unavailable
from bough.processes.child import Restarts
from deploy import app, forward
from deploy.app import DraftReplica, OrchestratorReplica, StageReplica, Supervising, TargetReplica, build
from deploy.forward import Forwarder
from deploy.index import HeadPlace, IndexPlace
from deploy.settings import Role
from tests.fakes.waiting import PATIENCE_SECONDS, until


class Asked:
    """A method of a replica, as its deployment's handle has it."""

    def __init__(self, method: Callable[[], Awaitable[Any]]) -> None:
        self.remote = method


class FakeIndex:
    """The handle of the deployment Index, which is at a port, or does not answer the next call with a `problem`."""

    deployment_name = "Index"

    def __init__(self) -> None:
        self.port, self.problem = 1, ""
        self.place = Asked(self._place)

    async def _place(self) -> IndexPlace:
        problem, self.problem = self.problem, ""
        if problem:
            raise RuntimeError(problem)
        return IndexPlace(f"redis://127.0.0.1:{self.port}")


class FakeSupervisor:
    """A program that is there, and has drained, as soon as it is let; none can be started with a `problem`."""

    made: list[FakeSupervisor]
    problem: str
    may_start: asyncio.Event
    may_end: asyncio.Event
    ready: Callable[[FakeSupervisor, float], Awaitable[None]]

    @classmethod
    def reset(cls) -> None:
        """No program yet; all may start and end."""
        cls.made, cls.problem, cls.may_start, cls.may_end = [], "", asyncio.Event(), asyncio.Event()
        cls.may_start.set()
        cls.may_end.set()
        cls.ready = AsyncMock()

    def __init__(self, settings: Any, host: str, index: Any) -> None:
        self.settings, self.host, self.index = settings, host, index
        self.has_ended = self.was_stopped = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.made.append(self)

    async def start(self) -> None:
        await self.may_start.wait()
        if self.problem:
            raise ConfigError(self.problem)

    async def check(self) -> None:
        await self.answers.wait()
        if self.has_ended:
            raise Unavailable("it ended with status 1")

    async def until_ready(self, timeout_seconds: float) -> None:
        await type(self).ready(self, timeout_seconds)

    async def stop(self) -> None:
        self.was_stopped = True
        await self.may_end.wait()

    @property
    def port(self) -> int:
        port: int = self.settings.config.port
        return port

    def forwarder(self) -> Forwarder | None:
        return Forwarder("http://127.0.0.1:9")


class Replica(OrchestratorReplica):
    """A replica that is ended by its test."""

    def __del__(self) -> None:
        pass


class Layers(StageReplica):
    """The same of a stage."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


class DraftWorker(DraftReplica):
    """The same of a draft worker."""

    def __del__(self) -> None:
        pass


@pytest.fixture
def index() -> FakeIndex:
    return FakeIndex()


@pytest.fixture
async def replica(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OrchestratorReplica]:
    """A replica whose program runs."""
    for name, value in {"Supervisor": FakeSupervisor, "PASSED_ON_SECONDS": 0.0, "MOVED_SECONDS": 0.0}.items():
        monkeypatch.setattr(app, name, value)
    FakeSupervisor.reset()
    made = Replica(index, [])
    await made.reconfigure({"program": {"host": "127.0.0.1"}})
    await made.check_health()
    yield made
    await made._end()


def waits(replica: OrchestratorReplica) -> bool:
    """Whether new requests would wait."""
    return not replica._forwarder._is_open.is_set()


async def restarted(replica: Supervising) -> None:
    assert replica._restart is not None
    await asyncio.wait([replica._restart])


async def test_an_ended_program_is_restarted_and_requests_wait(replica: OrchestratorReplica) -> None:
    (first,) = FakeSupervisor.made
    FakeSupervisor.may_start.clear()
    first.has_ended = True
    for _ in range(3):  # as many as Serve needs to end it
        await replica.check_health()
        await asyncio.sleep(0)
    assert waits(replica)
    FakeSupervisor.may_start.set()
    await restarted(replica)
    await replica.check_health()
    assert not waits(replica)
    assert first.was_stopped
    assert [(made.settings, made.host, made.index) for made in FakeSupervisor.made] == [
        (first.settings, "127.0.0.1", first.index)
    ] * 2


async def test_a_program_whose_index_has_moved_restarts_with_the_new_one(
    replica: OrchestratorReplica, index: FakeIndex
) -> None:
    """Serve learns nothing: it would replace the replica, in three checks and with another process."""
    (first,) = FakeSupervisor.made
    index.port = 2
    await replica.check_health()
    await restarted(replica)
    await replica.check_health()
    assert first.was_stopped
    assert [(made.settings, made.host, made.index.url) for made in FakeSupervisor.made] == [
        (first.settings, "127.0.0.1", f"redis://127.0.0.1:{number}") for number in (1, 2)
    ]
    assert not waits(replica)


async def test_streams_of_an_orchestrator_whose_index_has_moved_end_while_its_successor_serves(
    replica: OrchestratorReplica, index: FakeIndex
) -> None:
    FakeSupervisor.may_end.clear()
    index.port = 2
    await replica.check_health()
    await restarted(replica)
    assert not waits(replica)
    assert [made.index.url[-1] for made in FakeSupervisor.made] == ["1", "2"]
    FakeSupervisor.may_end.set()


async def test_a_program_restarts_again_if_its_index_moves_again(
    replica: OrchestratorReplica, index: FakeIndex
) -> None:
    """It would wait forever at an address that does not answer."""
    FakeSupervisor.may_start.clear()
    for number in (2, 3):
        index.port = number
        await replica.check_health()
        await until(lambda number=number: FakeSupervisor.made[-1].index.url.endswith(f":{number}"))
    FakeSupervisor.may_start.set()
    await restarted(replica)
    await replica.check_health()
    assert [made.was_stopped for made in FakeSupervisor.made] == [True, True, False]
    assert not waits(replica)
    assert replica._place.url == "redis://127.0.0.1:3"


async def test_settings_that_arrive_while_the_index_is_replaced_apply_to_the_next_program(
    replica: OrchestratorReplica, index: FakeIndex
) -> None:
    """The orchestrator that is asked may be the one that ends: that is no reason to replace this replica as well."""
    index.problem, index.port = "its replica has died", 2
    await replica.reconfigure({"program": {"host": "127.0.0.1", "max_running": 7}})
    assert FakeSupervisor.made[-1].index.url == "redis://127.0.0.1:2"


async def test_a_program_that_found_no_index_restarts_once_with_the_present_one(
    replica: OrchestratorReplica, index: FakeIndex
) -> None:
    FakeSupervisor.may_start.clear()
    FakeSupervisor.problem = "--index-url: must be a Redis or Valkey that answers"
    FakeSupervisor.may_end.clear()
    redeploying = asyncio.create_task(replica.reconfigure({"program": {"host": "127.0.0.1", "max_running": 7}}))
    await until(lambda: len(FakeSupervisor.made) == 2)
    index.port = 2
    FakeSupervisor.may_start.set()
    await until(lambda: FakeSupervisor.made[1].was_stopped)
    FakeSupervisor.problem = ""
    FakeSupervisor.may_end.set()
    await redeploying
    assert [made.index.url[-1] for made in FakeSupervisor.made] == ["1", "1", "2"]
    assert not waits(replica)


async def test_a_silent_index_has_not_moved(replica: OrchestratorReplica, index: FakeIndex) -> None:
    index.problem, index.port = "it does not answer", 2
    await replica.check_health()
    assert replica._restart is None
    assert len(FakeSupervisor.made) == 1


async def test_a_program_that_does_not_start_with_the_new_index_is_left_to_serve(
    replica: OrchestratorReplica, index: FakeIndex
) -> None:
    index.port = 2
    FakeSupervisor.problem = "its port is in use"
    await replica.check_health()
    await restarted(replica)
    for _ in range(3):
        with pytest.raises(ConfigError, match="its port is in use"):
            await replica.check_health()


@pytest.mark.parametrize("problem", ["", "its port is in use"])
async def test_a_program_that_ends_again_or_cannot_start_is_left_to_serve(
    replica: OrchestratorReplica, problem: str
) -> None:
    """Nothing waits there any more: Serve would wait for it before it starts another replica."""
    FakeSupervisor.problem = problem
    FakeSupervisor.made[-1].has_ended = True
    await replica.check_health()
    await restarted(replica)
    FakeSupervisor.made[-1].has_ended = True
    for _ in range(3):
        with pytest.raises((ConfigError, Unavailable), match=problem or "it ended with status 1"):
            await replica.check_health()
    assert not waits(replica)
    assert replica._forwarder._refusal
    assert len(FakeSupervisor.made) == 2


async def test_a_program_that_had_run_for_long_is_restarted_each_time(
    replica: OrchestratorReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "_restarts", Restarts(replace(app.IN_PLACE, steady_seconds=0.0)))
    for number in range(1, 4):
        FakeSupervisor.made[-1].has_ended = True
        await replica.check_health()
        await restarted(replica)
        assert len(FakeSupervisor.made) == number + 1


async def test_new_settings_replace_a_program_that_is_being_restarted(replica: OrchestratorReplica) -> None:
    FakeSupervisor.may_start.clear()
    FakeSupervisor.made[-1].has_ended = True
    await replica.check_health()
    await until(lambda: len(FakeSupervisor.made) >= 2)
    reconfiguring = asyncio.create_task(
        replica.reconfigure({"program": {"host": "127.0.0.1", "max_running": 7}, "niceness": 1})
    )
    await until(lambda: len(FakeSupervisor.made) >= 3)
    FakeSupervisor.may_start.set()
    await reconfiguring
    await replica.check_health()
    assert [made.was_stopped for made in FakeSupervisor.made] == [True, True, False]
    assert FakeSupervisor.made[-1].settings.config.max_running == 7
    assert not waits(replica)


async def test_a_check_overtaken_by_a_redeploy_ends_nothing(replica: OrchestratorReplica) -> None:
    (first,) = FakeSupervisor.made
    first.answers.clear()
    first.has_ended = True
    checking = asyncio.create_task(replica.check_health())
    await asyncio.sleep(0)
    await replica.reconfigure({"program": {"host": "127.0.0.1", "max_running": 7}})
    first.answers.set()
    await checking
    assert replica._restart is None
    await until(lambda: [made.was_stopped for made in FakeSupervisor.made] == [True, False])


async def test_streams_of_an_orchestrator_end_while_its_successor_serves(replica: OrchestratorReplica) -> None:
    """They were cut off after the drain, as the successor waited for it, and so did everybody who came meanwhile."""
    (first,) = FakeSupervisor.made
    FakeSupervisor.may_end.clear()
    before = replica._forwarder._forwarder
    await replica.reconfigure({"program": {"host": "127.0.0.1", "max_running": 7}})
    assert not waits(replica)
    assert replica._forwarder._forwarder is not before
    await until(lambda: first.was_stopped)
    assert before is not None
    assert not before._session.closed
    await replica.check_health()
    ending = asyncio.create_task(replica._end())
    await until(lambda: FakeSupervisor.made[-1].was_stopped)
    assert not ending.done(), "Serve waits until all have drained"
    FakeSupervisor.may_end.set()
    await ending
    assert before._session.closed


async def test_requests_wait_until_a_successor_has_a_target(replica: OrchestratorReplica) -> None:
    """One that has never seen a target refuses them at once, and the same redeploy may restart the target."""
    has_target = asyncio.Event()
    limits: list[float] = []

    async def ready(_: FakeSupervisor, timeout_seconds: float) -> None:
        limits.append(timeout_seconds)
        await has_target.wait()

    FakeSupervisor.ready = ready
    redeploying = asyncio.create_task(replica.reconfigure({"program": {"host": "127.0.0.1", "max_running": 7}}))
    await until(lambda: limits)
    assert waits(replica)
    has_target.set()
    await redeploying
    assert not waits(replica)
    assert limits[0] < forward.OPENING_SECONDS, "after which they are refused"


async def test_a_successor_whose_index_moves_does_not_wait_for_a_target(
    replica: OrchestratorReplica, index: FakeIndex
) -> None:
    """A redeploy that also moves the index finds its target at the new one: the next check starts the program there."""
    is_asked = asyncio.Event()

    async def ready(program: FakeSupervisor, _: float) -> None:
        is_asked.set()
        if program.index.url == "redis://127.0.0.1:1":
            await asyncio.Event().wait()

    FakeSupervisor.ready = ready
    redeploying = asyncio.create_task(replica.reconfigure({"program": {"host": "127.0.0.1", "max_running": 7}}))
    await is_asked.wait()
    assert not redeploying.done()
    index.port = 2
    await redeploying
    await replica.check_health()
    await restarted(replica)
    last = FakeSupervisor.made[-1]
    assert (last.index.url, last.settings.config.max_running) == ("redis://127.0.0.1:2", 7)
    assert not waits(replica)


async def test_a_change_of_rank_restarts_nothing(replica: OrchestratorReplica) -> None:
    """Ray Serve renumbers replicas when it takes one away, and calls with the settings that they have."""
    await replica.reconfigure({"program": {"host": "127.0.0.1"}})
    assert [made.was_stopped for made in FakeSupervisor.made] == [False]


@pytest.mark.usefixtures("replica")
async def test_a_worker_drains_before_another_uses_its_gpu() -> None:
    draft = DraftWorker("redis://127.0.0.1:1")
    await draft.reconfigure({"program": {"host": "127.0.0.1", "simulate": "two-cores"}})
    FakeSupervisor.may_end.clear()
    redeploying = asyncio.create_task(
        draft.reconfigure({"program": {"host": "127.0.0.1", "simulate": "two-cores", "max_waiting": 7}})
    )
    await until(lambda: FakeSupervisor.made[-1].was_stopped)
    assert not redeploying.done()
    num_made = len(FakeSupervisor.made)
    FakeSupervisor.may_end.set()
    await redeploying
    assert len(FakeSupervisor.made) == num_made + 1
    await draft._end()


class Head(TargetReplica):
    """The same of a head."""

    def __del__(self) -> None:
        pass


@pytest.mark.usefixtures("replica")
async def test_stages_find_a_head_that_waits_for_them_and_restart_when_it_has_moved() -> None:
    """Serve asks only replicas that have started: the head would wait for its stages, and they for it."""
    FakeSupervisor.may_start.clear()
    head = Head("redis://127.0.0.1:1", 2)
    await head.reconfigure({"program": {"host": "127.0.0.1", "model": "m", "port": 7421}})
    await until(lambda: FakeSupervisor.made[-1].settings.role is Role.TARGET)
    assert FakeSupervisor.made[-1].settings.flags[-2:] == ("--stages", "2")
    await head.check_health()
    stage = Layers(SimpleNamespace(deployment_name="Target", place=Asked(head.place)))
    FakeSupervisor.may_start.set()
    await stage.reconfigure({"program": {"host": "127.0.0.1", "model": "m"}})
    assert FakeSupervisor.made[-1].index == HeadPlace("127.0.0.1:7421")
    await restarted(head)
    await stage.check_health()
    num_made = len(FakeSupervisor.made)
    assert head._supervisor is not None
    head._supervisor.host = "127.0.0.2"
    await stage.check_health()
    await restarted(stage)
    assert [each.index for each in FakeSupervisor.made[num_made:]] == [HeadPlace("127.0.0.2:7421")]
    head._supervisor = None
    await stage.check_health()
    assert len(FakeSupervisor.made) == num_made + 1, "one that is being restarted has not moved"
    await stage._end()


@pytest.mark.usefixtures("replica")
async def test_a_head_that_cannot_start_is_left_to_serve() -> None:
    FakeSupervisor.problem = "its port is in use"
    head = Head("redis://127.0.0.1:1", 2)
    await head.reconfigure({"program": {"host": "127.0.0.1", "model": "m", "port": 7421}})
    await restarted(head)
    with pytest.raises(ConfigError, match="its port is in use"):
        await head.check_health()


async def test_a_stage_ends_after_its_head() -> None:
    """Serve ends both at the same time: running streams of the head were cut off."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1")
        place = HeadPlace(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ending = asyncio.create_task(app._closed(place, 3600.0))
        await asyncio.sleep(0.1)
        assert not ending.done()
        server.close()
        await ending
        await app._closed(place, 0.0)


def test_stages_are_a_deployment_of_their_own() -> None:
    target, stage = build({"stages": 3, "drafts": False})._bound_deployment.init_args[1]
    assert (target._bound_deployment.name, target._bound_deployment.num_replicas) == ("Target", 1)
    assert (stage._bound_deployment.name, stage._bound_deployment.num_replicas) == ("Stage", 2)
    assert target._bound_deployment.init_args[1] == 3


async def test_a_deployment_without_settings_is_refused_with_what_is_missing() -> None:
    """Serve leaves one without a `user_config` alone: it was healthy, and nothing ran there."""
    orchestrator = build({})._bound_deployment
    index, workers = list(orchestrator.init_args)
    deployed = [orchestrator, *(each._bound_deployment for each in (index, *workers))]
    assert [each.user_config for each in deployed] == [{}] * 4
    worker = DraftWorker("redis://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"^user_config\.program: --model: missing; must be set"):
        await worker.reconfigure({})
