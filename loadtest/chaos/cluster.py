"""A cluster for fault injection: every process is behind proxies, and can be killed and started again.

An index, and two each of targets, drafts and orchestrators; the second target has a stage. Each is reached through a
`LinkProxy`, and workers also through a `CallProxy`. Workers advertise their proxy's port, and bough's processes need no
change.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import redis.asyncio

from bough.client import Client
from bough.config.addresses import free_port
from bough.config.processes import DraftConfig, OrchestratorConfig, ServiceConfig, TargetConfig, to_flags
from bough.errors import BoughError
from bough.processes.exit_with_parent import python
from bough.processes.launch import INDEX, Cluster, Settings
from loadtest.chaos.proxy import LOCALHOST, CallProxy, LinkProxy

MODULES = {"target": "target_worker", "stage": "target_worker", "draft": "draft_worker", "orchestrator": "orchestrator"}
REPLICAS = 2
STAGED = "target-1"
START_SECONDS = 90.0  # limit until a started process is usable
POLL_SECONDS = 0.1
RESTART_SECONDS = 0.5  # delay before a process that ended by itself is restarted


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The port of a process and the proxies in front of it."""

    port: int  # the process's own
    link: LinkProxy
    calls: CallProxy | None  # in front of a worker, behind the link proxy

    @property
    def address(self) -> str:
        return f"{LOCALHOST}:{self.link.port}"


class ChaosCluster:
    """The processes, by names such as "target-0", with their proxies."""

    def __init__(self, cluster: Cluster, endpoints: dict[str, Endpoint], index_url: str) -> None:
        self.endpoints = endpoints
        self.index_url = index_url  # without the proxy
        self.unplanned_ends: Counter[str] = Counter()
        self._cluster = cluster
        self._down: set[str] = set()  # killed and not restarted yet

    @property
    def orchestrators(self) -> list[str]:
        """The orchestrators' addresses for clients."""
        return [endpoint.address for name, endpoint in self.endpoints.items() if name.startswith("orchestrator")]

    def names(self, kind: str) -> list[str]:
        """Names of the processes of a kind: "index", "target", "stage", "draft" or "orchestrator"."""
        return [name for name in self.endpoints if name.split("-")[0] == kind]

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL; it stays down until `restart`."""
        child = self._cluster.children[name]
        self._down.add(name)
        child.process.kill()
        child.process.wait()

    def restart(self, name: str) -> None:
        """Start a killed process again with its original command."""
        self._cluster.start(name, (child := self._cluster.children[name]).command, child.variables)
        self._down.discard(name)

    async def pause(self, name: str, seconds: float) -> None:
        """Suspend a process for some time; its connections stay open."""
        process = self._cluster.children[name].process
        os.kill(process.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)

    async def flush_index(self) -> None:
        """Delete all keys of the index; does nothing while it is down."""
        async with redis.asyncio.from_url(self.index_url, socket_timeout=1) as client:
            try:
                await client.flushall()
            except (redis.RedisError, OSError):
                return

    def is_paused_or_down(self, name: str) -> bool:
        """Whether a process is suspended or down."""
        process = self._cluster.children[name].process
        if name in self._down or process.poll() is not None:
            return True
        state = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state == "T"

    async def wait_until_usable(self, num_targets: int, num_drafts: int) -> None:
        """Returns once every orchestrator uses so many workers.

        Raises:
            TimeoutError: that took too long.
        """
        async with asyncio.timeout(START_SECONDS):
            for address in self.orchestrators:
                while await self._num_used(address) < (num_targets, num_drafts):
                    await asyncio.sleep(POLL_SECONDS)

    async def is_used(self, name: str) -> bool:
        """Whether some orchestrator uses the worker; for an orchestrator or the index, whether it answers."""
        if self.is_paused_or_down(name):
            return False
        if name not in (*self.names("target"), *self.names("draft")):
            return True
        used = [await self._used_addresses(address) for address in self.orchestrators]
        return any(self.endpoints[name].address in addresses for addresses in used)

    async def watched(self) -> None:
        """Restart and count processes that end by themselves, until cancelled."""
        while True:
            for name in self.endpoints:
                child = self._cluster.children[name]
                if name not in self._down and child.has_ended():
                    self.unplanned_ends[f"{name.split('-')[0]}: {child.process.returncode}"] += 1
                    print(f"{name} ended with status {child.process.returncode}:\n{child.tail()}", file=sys.stderr)
                    await asyncio.sleep(RESTART_SECONDS)
                    if self._cluster.children[name] is child and name not in self._down:
                        self._cluster.start(name, child.command, child.variables)
            await asyncio.sleep(POLL_SECONDS)

    async def _num_used(self, address: str) -> tuple[int, int]:
        used = await self._used_addresses(address)
        targets, drafts = ([self.endpoints[name].address for name in self.names(kind)] for kind in ("target", "draft"))
        return len(used & set(targets)), len(used & set(drafts))

    async def _used_addresses(self, orchestrator: str) -> set[str]:
        try:
            async with asyncio.timeout(2), Client(orchestrator) as client:
                workers = (await client.server_info()).workers
        except (BoughError, TimeoutError):
            return set()
        return {worker.address for worker in workers if not worker.problem}


@asynccontextmanager
async def chaos_cluster(
    target: TargetConfig,
    draft: DraftConfig,
    orchestrators: Sequence[OrchestratorConfig],
    rng: random.Random,
    on_verify: Callable[[str, bytes], None],
) -> AsyncIterator[ChaosCluster]:
    """All processes, ready, REPLICAS of each kind; `orchestrators` are the settings of as many.

    `on_verify` hears of every call of a target's Verify: the target's name, the request.
    """
    configs: dict[str, Sequence[ServiceConfig]] = {
        "target": [target, replace(target, stages=2)],
        "stage": [target],
        "draft": [draft] * REPLICAS,
        "orchestrator": orchestrators,
    }
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bough-chaos-")))
        cluster = Cluster(Settings(target, draft, orchestrators[0]), folder)
        stack.callback(cluster.stop_all)
        cluster.start_index()
        index_port = int(cluster.index_url.rpartition(":")[2])
        endpoints = {
            INDEX: Endpoint(index_port, await stack.enter_async_context(LinkProxy(index_port).running()), None)
        }
        for kind, replicas in configs.items():
            for number, config in enumerate(replicas):
                name = f"{kind}-{number}"
                endpoints[name] = await _open_endpoint(stack, name, rng, on_verify)
                cluster.start(name, _command(config, endpoints, name))
        running = ChaosCluster(cluster, endpoints, cluster.index_url)
        watch = asyncio.create_task(running.watched())
        stack.callback(watch.cancel)
        await running.wait_until_usable(REPLICAS, REPLICAS)
        yield running


async def _open_endpoint(
    stack: AsyncExitStack, name: str, rng: random.Random, on_verify: Callable[[str, bytes], None]
) -> Endpoint:
    port, calls = free_port(LOCALHOST), None

    def heard(method: str, request: bytes) -> None:
        if method.endswith("/Verify"):
            on_verify(name, request)

    if not name.startswith("orchestrator"):
        calls = await stack.enter_async_context(CallProxy(port, random.Random(rng.random()), heard).running())
    link = await stack.enter_async_context(LinkProxy(calls.port if calls else port).running())
    return Endpoint(port, link, calls)


def _command(config: ServiceConfig, endpoints: Mapping[str, Endpoint], name: str) -> Sequence[str]:
    own, kind = endpoints[name], name.split("-")[0]
    config = replace(
        config, port=own.port, advertise_port=own.link.port, index_url=f"redis://{endpoints[INDEX].address}"
    )
    stage_of = ("--stage-of", endpoints[STAGED].address) if kind == "stage" else ()
    return python(MODULES[kind], *to_flags(config), *stage_of)
