"""Looks after one program: starts it, waits until it serves, notices when it no longer does, ends it. Knows no Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress

from bough.config.addresses import bare, joined
from bough.config.processes import OrchestratorConfig
from bough.config.reader import with_shared
from bough.errors import BoughError, ConfigError, Unauthenticated, Unavailable
from bough.processes.child import Child
from bough.protocol.generation import Loads
from bough.protocol.messages import WorkerInfo
from bough.rpc.server import is_serving
from bough.security.access import Access
from deploy.child import describe_end, python, start, stop
from deploy.forward import Forwarder
from deploy.ports import free_port, require_free_port
from deploy.progress import Progress
from deploy.settings import ProgramSettings, Role
from deploy.stubs import get_loads, get_worker_info

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
CALL_SECONDS = 5.0  # that a program has to answer a health check
DRAIN_MARGIN_SECONDS = 5.0  # beyond the program's own patience, before it is signalled again


class Supervisor:
    """One program, or none before `start` and after `stop`."""

    def __init__(self, settings: ProgramSettings, host: str, index_url: str) -> None:
        """`host` is this node's address: the program listens there, and is announced by it."""
        self.settings, self.host = settings, bare(host)
        self._index_url = index_url
        self._port = settings.config.port or free_port(self.host)
        self.http_port = _http_port(settings, self.host)  # -1 where there is no door for HTTP
        self._progress = Progress()
        self._access = Access.of(with_shared(settings.config, os.environ))
        self._child: Child | None = None
        self._channel = self._access.own_channel(self.address)
        self._answered: float | None = None  # on the monotonic clock: when it was last heard of; None before it serves

    @property
    def address(self) -> str:
        """Of the program's gRPC services."""
        return joined(self.host, self._port)

    def forwarder(self) -> Forwarder | None:
        """To the program's door for HTTP, where it has one."""
        if self.http_port < 0:
            return None
        context = self._access.own_context
        scheme = "http" if context is None else "https"
        return Forwarder(f"{scheme}://{joined(self.host, self.http_port)}", context)

    @property
    def role(self) -> Role:
        return self.settings.role

    async def start(self) -> None:
        """Starts the program and returns when it serves.

        An orchestrator serves once it answers: whether there is a target to ask is not its doing.

        Raises:
            ConfigError: its port is in use, it has ended instead, with the last lines of its log, or took too long.
        """
        supervision = self.settings.supervision
        if self.settings.config.port:
            require_free_port(self.host, self._port)
        command = python(self.role.module, self._flags())
        variables = child_variables(self.settings, self._index_url)
        child = start(self.role.module, command, variables, supervision.niceness, supervision.log_folder)
        self._child = child
        deadline = time.monotonic() + supervision.start_seconds
        service = "" if self.role is Role.ORCHESTRATOR else self.role.service
        while not await is_serving(self._channel.current, service, CALL_SECONDS):
            if child.has_ended():
                raise ConfigError(describe_end(child))
            if time.monotonic() > deadline:
                child.process.kill()
                raise ConfigError(f"{self.role.module} did not serve within {supervision.start_seconds:g} s")
            await asyncio.sleep(POLL_SECONDS)
        self._answered = time.monotonic()
        logger.info("%s serves at %s; its log is %s", self.role.module, self.address, child.log)

    async def check(self) -> None:
        """Returns while the program is well, or may become well again by itself.

        Raises:
            Unavailable: it has ended, has been silent for too long, or stalls. It is over then.
        """
        child, answered = self._child, self._answered
        if child is None or answered is None:  # it is starting, which `start` watches
            return
        if child.has_ended():
            raise Unavailable(describe_end(child))
        await asyncio.to_thread(self._access.refresh)
        try:
            problem = await self._problem()
        except BoughError as exc:
            silent_seconds = time.monotonic() - answered
            if silent_seconds < self.settings.supervision.silent_seconds:
                return
            problem = f"has not answered for {silent_seconds:.0f} s ({exc})"
        if problem:
            child.process.kill()
            raise Unavailable(f"{self.role.module} at {self.address} {problem}; its process was ended")

    async def loads(self) -> Loads:
        """What an orchestrator is doing."""
        return await get_loads(self._channel.current, self.address, CALL_SECONDS, self._access.credentials)

    async def info(self) -> WorkerInfo:
        """What a worker is doing."""
        channel, shown = self._channel.current, self._access.credentials
        return await get_worker_info(channel, self.role, self.address, CALL_SECONDS, shown)

    async def stop(self) -> None:
        """Lets the program finish what it does, for as long as its own settings say, and ends it."""
        if self._child is not None:
            patience_seconds = self.settings.config.drain_seconds + DRAIN_MARGIN_SECONDS
            await stop(self._child, patience_seconds, self.settings.supervision.log_folder)
        await self._channel.close()

    async def _problem(self) -> str:
        """What is wrong with a program that answers; empty where nothing is. Raises what it means not to answer."""
        if self.role is Role.ORCHESTRATOR:
            with suppress(Unauthenticated):  # an answer all the same
                await self.loads()
            self._answered = time.monotonic()
            return ""
        info = await self.info()
        now = self._answered = time.monotonic()
        seconds = self._progress.stalled_seconds(info, now)
        if seconds < self.settings.supervision.stall_seconds:
            return ""
        return f"has {info.num_waiting + info.num_running} calls, and no pass has ended for {seconds:.0f} s"

    def _flags(self) -> list[str]:
        """The last of equal flags wins, so what is added here does.

        How long the program may drain is among it, for `stop` waits as long: the node's environment must not differ.
        """
        flags = [*self.settings.flags, "--host", self.host, "--port", str(self._port)]
        flags += ["--drain-seconds", str(self.settings.config.drain_seconds)]
        return flags if self.http_port < 0 else [*flags, "--http-port", str(self.http_port)]


def child_variables(settings: ProgramSettings, index_url: str) -> dict[str, str]:
    """What the program needs beside, or instead of, the node's environment.

    Ray sets OMP_NUM_THREADS to 1 in its workers. The index's URL, which may have a password, is on no command line.
    """
    threads = {"OMP_NUM_THREADS": str(settings.num_threads)}
    name = f"BOUGH_{settings.role.value.upper()}_INDEX_URL"
    return {**threads, **dict(settings.environment), name: index_url}


def _http_port(settings: ProgramSettings, host: str) -> int:
    """Of an orchestrator; a free one unless it is set, -1 for none."""
    config = settings.config
    if not isinstance(config, OrchestratorConfig):
        return -1
    port = int(getattr(config, "http_port", -1))
    return port or free_port(host)
