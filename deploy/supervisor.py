"""Supervises one program: starts it, waits until it serves, checks it, and stops it. It does not use Ray."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from math import inf
from typing import IO, Any

import grpc

from bough.concurrency.stall_timer import StallTimer
from bough.concurrency.tasks import came_true
from bough.config.addresses import bare, bound, free_port, joined
from bough.config.processes import OrchestratorConfig, ServiceConfig, TargetConfig, parse, to_flags
from bough.config.reader import variable
from bough.errors import BoughError, ConfigError, Unauthenticated, Unavailable
from bough.pb import common_pb2, generation_pb2
from bough.processes.child import Child, open_program, stop_program, temporary_folder
from bough.processes.exit_with_parent import python
from bough.processes.process import for_metrics
from bough.protocol.codec_fields import read
from bough.protocol.generation import Loads, WorkerInfo
from bough.rpc.server import is_serving
from bough.rpc.services import stub_of
from bough.rpc.status_map import to_error
from bough.security.access import Access
from deploy.forward import Forwarder
from deploy.index import HeadPlace, IndexPlace
from deploy.settings import PORTS, REPLICA_ENDING_SECONDS, ProgramSettings, Role

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
CALL_SECONDS = 5.0  # within which a program must answer a health check
GPUS = "CUDA_VISIBLE_DEVICES"  # set by Ray in replicas that request GPUs
UNASKED_SECONDS = 60.0  # longer than Serve's interval of checks: there were no checks meanwhile
LEAVING_SECONDS = 30.0  # within which a draining orchestrator has closed its ports


class Supervisor:
    """One program; none before `start` and after `stop`."""

    def __init__(self, settings: ProgramSettings, host: str, place: IndexPlace | HeadPlace) -> None:
        """Prepare a program that listens on `host`, this node's address, and advertises it; a stage has a head's place.

        Raise ConfigError naming a setting, or an environment variable of this node, that is unusable.
        """
        self.settings, self.host = settings, bare(host)
        # A variable of the node must not change how long `stop` waits.
        # They come last, as the last of equal flags counts.
        fixed = ("--host", self.host, "--drain-seconds", str(settings.config.drain_seconds))
        config = parse(self.role.config, self.role.module, [*settings.flags, *fixed], os.environ)
        self._index_url = place.url_for(config) if isinstance(place, IndexPlace) else ""
        if isinstance(place, HeadPlace) and isinstance(config, TargetConfig):
            config = replace(config, stages=1, stage_of=place.address)
        config = replace(config, port=config.port or free_port(self.host))
        if isinstance(config, OrchestratorConfig):
            config = replace(config, http_port=config.http_port or free_port(self.host))
        self._stall = StallTimer()
        self._own_key = _key_of_its_own(config)
        if self._own_key is not None:
            config = replace(config, worker_key_file=self._own_key.name)
        self._config, self._access = config, Access.of(config)
        self._child: Child | None = None
        self._channel = self._access.own_channel(self.address)
        self._has_served = False
        self._silent_since: float | None = None  # monotonic time of the first check that it did not answer
        self._checked = -inf  # monotonic time at which the last check ended

    @property
    def address(self) -> str:
        """Address of the program's gRPC services."""
        return joined(self.host, self.port)

    @property
    def port(self) -> int:
        return self._config.port

    def forwarder(self) -> Forwarder | None:
        """Return a forwarder to the program's HTTP port; None if that is off or requires certificates of clients.

        Serve's proxy requires none, so clients could not show theirs.
        """
        config = self._config
        if not isinstance(config, OrchestratorConfig) or config.http_port < 0 or config.tls_client_ca:
            return None
        context = self._access.own_context
        scheme = "http" if context is None else "https"
        return Forwarder(f"{scheme}://{joined(self.host, config.http_port)}", context)

    @property
    def role(self) -> Role:
        return self.settings.role

    async def start(self) -> None:
        """Start the program and return when it serves.

        An orchestrator serves as soon as it answers, with or without a target. Raise ConfigError if its port is in use,
        it ended (the message has its log's last lines), or it took too long.
        """
        self._child = child = await self._started()
        seconds = self.settings.supervision.start_seconds
        if not await self._serves("" if self.role is Role.ORCHESTRATOR else self.role.service.full_name, seconds):
            if child.has_ended():
                raise ConfigError(child.describe_end())
            child.process.kill()
            raise ConfigError(f"{self.role.module} did not serve within {seconds:g} s")
        if self.role is not Role.STAGE:  # it has no call for people
            await self._require_answers(child)
        self._has_served = True
        logger.info("%s serves at %s; its log is %s", self.role.module, self.address, child.log)

    async def until_ready(self, timeout_seconds: float) -> None:
        """Return once a request could be served, by an orchestrator once it has a target, or after this time."""
        await self._serves(self.role.service.full_name, timeout_seconds)

    async def _serves(self, service: str, timeout_seconds: float) -> bool:
        """Wait until a service serves; False if the program has ended before, or at this time."""
        deadline = time.monotonic() + timeout_seconds
        while not await is_serving(self._channel.current, service, CALL_SECONDS):
            if self._child is None or self._child.has_ended() or time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def _started(self) -> Child:
        supervision, module = self.settings.supervision, self.role.module
        command = python(module, *to_flags(self._config, excluding=("index_url",)))
        variables = child_variables(self.settings, self._index_url)
        gpus, seconds = os.environ.get(GPUS, ""), self._timeout_seconds
        if self.role is Role.ORCHESTRATOR:  # it needs no GPU, and an earlier one closes its ports before it drains
            gpus, seconds = "", LEAVING_SECONDS
        async with gpu_lock(module, gpus, seconds) as held:
            for name in PORTS:
                host = for_metrics(self._config).host if name == "metrics_port" else self.host
                if (port := getattr(self._config, name, 0)) > 0:
                    await until_free(name, host, port, seconds)
            return open_program(module, command, variables, supervision.niceness, supervision.log_folder, (held,))

    @property
    def _timeout_seconds(self) -> float:
        """How long a program may take to end by itself after SIGTERM."""
        return self.settings.config.drain_seconds + REPLICA_ENDING_SECONDS

    async def check(self) -> None:
        """Return if the program is healthy or may recover by itself.

        Raise Unavailable if it has ended, or was silent or stalled for too long and has been killed.
        """
        child = self._child
        if child is None or not self._has_served:  # `start` watches it until it serves
            return
        if child.has_ended():
            raise Unavailable(child.describe_end())
        await asyncio.to_thread(self._access.refresh)
        began = time.monotonic()
        try:
            problem = await self._problem()
        except BoughError as exc:
            # Only time with checks counts: there are none while Ray has no head.
            if self._silent_since is None or began - self._checked > UNASKED_SECONDS:
                self._silent_since = began
            silent_seconds = time.monotonic() - self._silent_since
            if silent_seconds < self.settings.supervision.silent_seconds:
                return
            problem = f"has not answered for {silent_seconds:.0f} s ({exc})"
        finally:
            self._checked = time.monotonic()
        if problem:
            child.process.kill()
            raise Unavailable(f"{self.role.module} at {self.address} {problem}; its process was killed")

    async def loads(self) -> Loads:
        return read(await self._ask("GetLoads", generation_pb2.GetLoadsRequest()), Loads)

    async def info(self) -> WorkerInfo:
        return read(await self._ask("GetServerInfo", common_pb2.GetServerInfoRequest()), WorkerInfo)

    async def _ask(self, method: str, request: object) -> Any:
        """Call the program. Raises the error for its status, or for a timeout."""
        call = getattr(stub_of(self.role.service, self._channel.current), method)
        try:
            return await call(request, timeout=CALL_SECONDS, metadata=self._access.credentials)
        except grpc.aio.AioRpcError as exc:
            raise to_error(exc, self.address) from exc

    async def stop(self) -> None:
        """Let the program drain for the time in its settings, and end it."""
        if self._child is not None:
            await stop_program(self._child, self._timeout_seconds, self.settings.supervision.log_folder)
        await self._channel.close()
        if self._own_key is not None:
            self._own_key.close()

    async def _require_answers(self, child: Child) -> None:
        """Raise ConfigError if the program would refuse calls of its supervisor: health checks do not show this."""
        try:
            await (self.loads() if self.role is Role.ORCHESTRATOR else self.info())
        except Unauthenticated as exc:
            child.process.terminate()
            names = ",".join(self._config.tls_peer_names)
            raise ConfigError(
                "program.tls_peer_names: must name its own certificate, which its supervisor presents, got " + names
            ) from exc

    async def _problem(self) -> str:
        """Return the problem of a program that answers, or "". Raise the error if it does not answer."""
        if self.role is Role.ORCHESTRATOR:
            with suppress(Unauthenticated):  # counts as an answer
                await self.loads()
            self._silent_since = None
            return ""
        if self.role is Role.STAGE:  # its head finds a pass that does not end
            if not await is_serving(self._channel.current, self.role.service.full_name, CALL_SECONDS):
                raise Unavailable("health: must be SERVING")
            self._silent_since = None
            return ""
        info = await self.info()
        self._silent_since, now = None, time.monotonic()
        num_calls = info.num_waiting + info.num_running
        seconds = self._stall.seconds(num_calls > 0, info.num_passes, now)
        if seconds < self.settings.supervision.stall_seconds:
            return ""
        return f"has {num_calls} calls, and no pass has ended for {seconds:.0f} s"


async def until_free(name: str, host: str, port: int, timeout_seconds: float) -> None:
    """Wait for an earlier program, whose replica died and which still drains, to close the port of the setting `name`.

    The program itself reports other errors of the address. Raise ConfigError if the port stays in use: its server
    would be mistaken for the program.
    """

    def is_free() -> bool:
        try:
            bound(host, port).close()
        except OSError as exc:
            return exc.errno != errno.EADDRINUSE
        return True

    if is_free():
        return
    logger.info("waiting for port %d at %s (program.%s) to be free, %g s at most", port, host, name, timeout_seconds)
    if not await came_true(is_free, timeout_seconds):
        raise ConfigError(f"program.{name}: must be free at {host}, got {port}, which is in use")


def child_variables(settings: ProgramSettings, index_url: str) -> dict[str, str]:
    """Return variables that extend or override the node's environment.

    Ray sets OMP_NUM_THREADS to 1 in its workers. The index's URL is a variable, as it may contain a password.
    """
    threads = {"OMP_NUM_THREADS": str(getattr(settings.config, "threads", os.cpu_count() or 1))}
    index = {variable(settings.role.module, "index_url"): index_url} if index_url else {}
    return {**threads, **dict(settings.environment), **index}


def _key_of_its_own(config: ServiceConfig) -> IO[str] | None:
    """Return a file with a new secret, deleted when closed, for an orchestrator that requires keys to report its load.

    None if keys are not required, or if all processes share a secret, which the supervisor then uses.
    """
    if not isinstance(config, OrchestratorConfig) or not config.keys or config.worker_key_file:
        return None
    file = tempfile.NamedTemporaryFile("w", prefix="bough-key-")  # noqa: SIM115  # of mode 600; closed by `stop`
    file.write(secrets.token_hex(32))
    file.flush()
    return file


@asynccontextmanager
async def gpu_lock(module: str, gpus: str, timeout_seconds: float) -> AsyncIterator[int]:
    """Wait until no earlier program has these GPUs, as in GPUS, or until `timeout_seconds` have passed; "" is none.

    Yields a file descriptor for the program to inherit: the lock lasts while any process has it open. After the
    timeout the program starts anyway, with a warning, as several programs may share a GPU on purpose.
    """
    folder = temporary_folder()
    name = re.sub(r"[^\w.-]", "-", f"{module}-GPU-{gpus}.lock")
    descriptor = os.open(folder / name if gpus else os.devnull, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        if gpus and not _taken(descriptor):
            logger.info("waiting for an earlier %s to leave GPU %s, %g s at most", module, gpus, timeout_seconds)
            if not await came_true(lambda: _taken(descriptor), timeout_seconds):
                logger.warning("an earlier %s still has GPU %s: starting another one anyway", module, gpus)
        yield descriptor
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
