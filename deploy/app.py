"""The application that a Serve configuration names, `import_path: deploy.app:build`, and its replicas.

Serve places, checks, scales and replaces replicas. Each supervises one program.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from bough.concurrency.tasks import end, first_of, run_to_completion
from bough.config.addresses import bare, is_wildcard, joined
from bough.errors import ConfigError, Unavailable
from bough.processes.child import RestartPolicy, Restarts
from deploy.forward import Forwarder, WaitingForwarder
from deploy.index import HeadPlace, IndexPlace, IndexServer
from deploy.policies import CALLS, REQUESTS
from deploy.settings import (
    INDEX,
    STOP_SECONDS,
    AppSettings,
    ProgramSettings,
    Role,
    read_fields,
    read_index,
    read_program,
    resolved_url,
)
from deploy.supervisor import Supervisor

MANY = 100_000  # requests at one replica; the orchestrator's admission limits how many run
OPTIONS: Mapping[str, Any] = {  # unless the configuration says otherwise
    "ray_actor_options": {"num_cpus": 0},  # custom resources choose the node
    "user_config": {},  # a replica without any would start nothing, and be healthy
    "max_ongoing_requests": MANY,
    "health_check_period_s": 2.0,  # three failures in a row replace a replica
    "health_check_timeout_s": 20.0,
    "graceful_shutdown_timeout_s": STOP_SECONDS,
    "max_surge_percent": 0,  # no GPU or port is spare for a second replica
}
PLACE_SECONDS = 120.0  # a replica waits this long for the index, or its head, to be placed
ASK_SECONDS = 5.0
IN_PLACE = RestartPolicy(first_pause_seconds=0.0, max_in_a_row=1)  # a program that ends again sooner is left to Serve
PASSED_ON_SECONDS = 0.5  # in which a forwarded request reaches its program
MOVED_SECONDS = 1.0  # between two requests for that address
READY_SECONDS = 50.0  # that a restarted program has to find a target before it gets requests

logger = logging.getLogger(__name__)

Source: TypeAlias = "DeploymentHandle | str"  # the deployment of the index, or of a stage's head; or the index's URL


def node_address() -> str:
    """Return the address that the cluster uses for this node (`ray start --node-ip-address`)."""
    node_id = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)


class IndexReplica:
    """The index and its address."""

    def __init__(self) -> None:
        self._server: IndexServer | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Start the index, or restart it with other settings."""
        settings = read_index(user_config)
        await self._stop()
        server = IndexServer(settings, node_address())
        await server.wait()
        self._server = server

    async def place(self) -> IndexPlace:
        """Return the index's address."""
        if self._server is None:
            raise Unavailable("the index is being started")
        return self._server.place

    async def check_health(self) -> None:
        """Raise if the server has ended or does not answer."""
        if self._server is not None:
            await self._server.check()

    async def __del__(self) -> None:
        """Stop the server, as the deployment ends or moves to another node."""
        await self._stop()

    async def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()


class Supervising:
    """The parts that replicas of workers and of orchestrators share.

    A program restarts when its place moves: that of the index, or of a stage's head.
    """

    role: Role

    def __init__(self, source: Source) -> None:
        self._source = source
        self._place: IndexPlace | HeadPlace = IndexPlace("")
        self._supervisor: Supervisor | None = None
        self._restart: asyncio.Task[None] | None = None  # of a program that has ended by itself, or whose index moved
        self._is_reconfiguring = False  # while new settings are applied, which a restart must not overtake
        self._restarts = Restarts(IN_PLACE)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Start the program, or restart it with new settings.

        Serve calls this after the constructor, for one replica after the other when `user_config` has changed, and
        when only the rank of a replica has changed, which does not matter to the program.
        """
        settings = self._read(user_config)
        if self._supervisor is not None and self._supervisor.settings == settings:
            return
        self._is_reconfiguring = True
        try:
            await self._end_restart()
            await self._leave()
            self._place = await self._wait_for_place()
            await self._start_at_place(settings, settings.host or node_address())
        finally:
            self._is_reconfiguring = False

    def _read(self, user_config: dict[str, Any]) -> ProgramSettings:
        return read_program(self.role, user_config)

    async def _start(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        await supervisor.start()
        await self._started(supervisor)
        self._restarts.served()

    async def _start_at_place(self, settings: ProgramSettings, host: str) -> None:
        """Start a program, and again if its place moves meanwhile: a program ends if it finds no index."""
        self._restarts = Restarts(IN_PLACE)  # the ends of an earlier program do not count
        try:
            await self._start(Supervisor(settings, host, self._place))
        except ConfigError:
            place = await self._wait_for_place()
            if place == self._place:
                raise
            self._place = place
            await self._stop()
            await self._start(Supervisor(settings, host, place))

    async def check_health(self) -> None:
        """Raise if this replica must be replaced.

        A program that has ended is restarted here, but not too often; one whose place has moved is restarted each
        time. Serve would take three checks, and another process on a node with the same resources.
        """
        restart, supervisor = self._restart, self._supervisor
        if restart is not None and restart.done():
            restart.result()
        if supervisor is None or self._is_reconfiguring:
            return
        if restart is None or restart.done():
            try:
                await supervisor.check()
            except Unavailable as exc:
                if supervisor is not self._supervisor or self._is_reconfiguring:  # a redeploy has ended it meanwhile
                    return
                if self._restarts.ended() is None:
                    raise
                logger.warning("%s\nrestarting it", exc)
                self._restart = asyncio.create_task(self._start_again(supervisor))
                return
        place = await self._place_now()
        if place == self._place or supervisor is not self._supervisor or self._is_reconfiguring:
            return
        logger.warning("%s has become %s: restarting the program", self._place, place)
        self._restart = asyncio.create_task(self._start_elsewhere(supervisor, place, restart))

    async def _start_again(self, ended: Supervisor) -> None:
        """Restart a program without calls to Ray, as its head may be lost meanwhile."""
        await run_to_completion(self._stop())
        await self._start(Supervisor(ended.settings, ended.host, self._place))

    async def _start_elsewhere(
        self, before: Supervisor, place: IndexPlace | HeadPlace, restart: asyncio.Task[None] | None
    ) -> None:
        """Restart a program with the new address, even if `restart` is starting it with the old one."""
        self._place = place
        if restart is not None:
            await run_to_completion(end(restart))
        await run_to_completion(self._leave())
        await self._start_at_place(before.settings, before.host)

    async def __del__(self) -> None:
        """Drain before a redeploy or when scaling down; Serve waits for it."""
        await self._end()

    async def _leave(self) -> None:
        """Let the program drain before its successor starts, as it has the GPU; may be overridden."""
        await self._stop()

    async def _end(self) -> None:
        await self._end_restart()
        await self._stop()

    async def _end_restart(self) -> None:
        restart, self._restart = self._restart, None
        if restart is not None:
            await end(restart)

    async def _started(self, supervisor: Supervisor) -> None:
        """Run once the program serves; subclasses override it."""

    async def _stop(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            await supervisor.stop()

    async def _place_now(self) -> IndexPlace | HeadPlace:
        """Return the place, or the last known one while the index or head is being replaced; streams continue."""
        try:
            return await self._find_place(ASK_SECONDS)
        except Unavailable:
            return self._place

    async def _wait_for_place(self) -> IndexPlace | HeadPlace:
        """Wait until the index or head is placed: a call may reach a replica that is being replaced, and fail."""
        deadline = time.monotonic() + PLACE_SECONDS
        while True:
            try:
                return await self._find_place(deadline - time.monotonic())
            except Unavailable:
                if time.monotonic() > deadline - MOVED_SECONDS:
                    raise
                await asyncio.sleep(MOVED_SECONDS)

    async def _until_it_moves(self) -> None:
        while await self._place_now() == self._place:
            await asyncio.sleep(MOVED_SECONDS)

    async def _find_place(self, timeout_seconds: float) -> IndexPlace | HeadPlace:
        if isinstance(self._source, str):
            return IndexPlace(resolved_url(self._source, os.environ))
        name = self._source.deployment_name
        try:
            async with asyncio.timeout(timeout_seconds):
                place: IndexPlace | HeadPlace = await self._source.place.remote()
                return place
        except TimeoutError as exc:
            raise Unavailable(f"the deployment {name} does not answer within {timeout_seconds:g} s") from exc
        except Exception as exc:  # Serve raises various classes if a deployment has no replica
            raise Unavailable(f"the deployment {name} does not report its address: {exc!r}") from exc


class TargetReplica(Supervising):
    """A target worker. Their number is fixed, as a new one reads weights for minutes."""

    role = Role.TARGET

    def __init__(self, index: Source, stages: int) -> None:
        """Supervise a target of so many members, whose head it is; 1 is a target by itself."""
        super().__init__(index)
        self._stages = stages

    async def place(self) -> HeadPlace:
        """Return the address at which stages join."""
        if (supervisor := self._supervisor) is None:
            raise Unavailable("the target is being started")
        host = node_address() if is_wildcard(supervisor.host) else supervisor.host
        return HeadPlace(joined(host, supervisor.port))

    def _read(self, user_config: dict[str, Any]) -> ProgramSettings:
        settings = super()._read(user_config)
        return replace(settings, flags=(*settings.flags, "--stages", str(self._stages)))

    async def _start_at_place(self, settings: ProgramSettings, host: str) -> None:
        """Start a program.

        A head waits for its stages, and Serve passes their call of `place` on only when this replica has started. So a
        head starts in the background, and `check_health` raises what the start raises.
        """
        starting = super()._start_at_place(settings, host)
        if self._stages == 1:
            await starting
        else:
            self._restart = asyncio.create_task(starting)


class StageReplica(Supervising):
    """Layers of the target on another node."""

    role = Role.STAGE

    async def __del__(self) -> None:
        """Compute until the head has drained, as it may end too."""
        if self._supervisor is not None and isinstance(self._place, HeadPlace):
            await _closed(self._place, self._supervisor.settings.config.drain_seconds)
        await super().__del__()


async def _closed(head: HeadPlace, timeout_seconds: float) -> None:
    """Wait until the head's port is closed, or for this time."""
    host, _, port = head.address.rpartition(":")
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_seconds):
            while True:
                _, writer = await asyncio.open_connection(bare(host), int(port))
                writer.close()
                await asyncio.sleep(MOVED_SECONDS)


class DraftReplica(Supervising):
    """A draft worker; Serve adds more when trees have to wait."""

    role = Role.DRAFT

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how many trees grow or wait."""
        info = await self._supervisor.info() if self._supervisor else None
        return {CALLS: float(info.num_waiting + info.num_running) if info else 0.0}


class OrchestratorReplica(Supervising):
    """An orchestrator; it also forwards requests from Serve's HTTP proxy to its own HTTP port."""

    role = Role.ORCHESTRATOR

    def __init__(self, index: Source, workers: list[DeploymentHandle]) -> None:
        """Keep `workers` only so that Serve deploys them with the application; they are found through the index."""
        super().__init__(index)
        self._workers = workers
        self._forwarder = WaitingForwarder()
        self._leaving: set[asyncio.Task[None]] = set()  # of programs that drain while their successors run
        self._has_served = False

    async def __call__(self, request: Request) -> Response:
        """Answer one HTTP request, streamed."""
        return await self._forwarder.forward(request)

    async def check_health(self) -> None:
        """Raise if this replica must be replaced; requests that wait for its program are then refused."""
        try:
            await super().check_health()
        except Exception:
            self._forwarder.give_up()
            raise
        self._forwarder.undo_give_up()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how many requests run and wait, from all ports."""
        loads = await self._supervisor.loads() if self._supervisor else None
        return {REQUESTS: float(loads.num_requests_running + loads.num_requests_waiting) if loads else 0.0}

    async def _leave(self) -> None:
        """Let the program drain while its successor starts: it closes its ports at once, and its requests continue.

        Requests through Serve's proxy wait until the successor serves.
        """
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        leaving = asyncio.create_task(_drained(supervisor, self._forwarder.release()))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _end(self) -> None:
        await asyncio.gather(super()._end(), *self._leaving)

    async def _started(self, supervisor: Supervisor) -> None:
        if self._has_served:  # requests wait, possibly for a target that restarts too
            await first_of(supervisor.until_ready(READY_SECONDS), self._until_it_moves())
        self._has_served = True
        self._forwarder.open(supervisor.forwarder())

    async def _stop(self) -> None:
        self._forwarder.pause()
        await super()._stop()
        await self._forwarder.close()


async def _drained(supervisor: Supervisor, forwarder: Forwarder | None) -> None:
    """End a program once forwarded requests have reached it, and then close the connections to it."""
    await asyncio.sleep(PASSED_ON_SECONDS)
    await supervisor.stop()
    if forwarder is not None:
        await forwarder.close()


def build(args: dict[str, Any]) -> serve.Application:
    """Bind all deployments to one another; the configuration sets the number and place of replicas.

    Raise ConfigError naming an argument that is unknown.
    """
    settings = read_fields(AppSettings, args, "args")
    index = settings.index_url or serve.deployment(name=INDEX, **OPTIONS)(IndexReplica).bind()
    target = serve.deployment(name=Role.TARGET.value, **OPTIONS)(TargetReplica).bind(index, settings.stages)
    workers = [target]
    if settings.stages > 1:
        others = serve.deployment(name=Role.STAGE.value, num_replicas=settings.stages - 1, **OPTIONS)(StageReplica)
        workers.append(others.bind(target))
    if settings.drafts:
        workers.append(serve.deployment(name=Role.DRAFT.value, **OPTIONS)(DraftReplica).bind(index))
    options = {**OPTIONS, "graceful_shutdown_timeout_s": Role.ORCHESTRATOR.stop_seconds}
    return serve.deployment(name=Role.ORCHESTRATOR.value, **options)(OrchestratorReplica).bind(index, workers)
