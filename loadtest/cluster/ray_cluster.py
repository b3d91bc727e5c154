"""A Ray cluster over several hosts with bough deployed on it, and ways to query and disturb it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.client import Client
from bough.errors import BoughError, ConfigError, Unavailable
from bough.health.ray_dashboard import Deployment, RayDashboard, Replica
from bough.protocol.generation import ServerInfo, WorkerStatus
from loadtest.cluster.hosts import Host, hosts

FRONT, TARGET, DRAFT = "front", "target", "draft"
GCS_PORT, DASHBOARD_PORT, ORCHESTRATOR_PORT, HTTP_PORT = 6390, 8265, 7411, 8000
OTHER_INDEX = "other_index"  # resource of the host to which the index moves
RESOURCES: Mapping[str, Mapping[str, int]] = {
    FRONT: {"index": 1, "orchestrator": 1},
    TARGET: {"target_gpu": 1},
    DRAFT: {"draft_gpu": 2, "orchestrator": 1, OTHER_INDEX: 1},
}
START_SECONDS = 240.0  # limit until all nodes have joined, and until bough serves
POLL_SECONDS = 0.5
SCALING = ("UPSCALING", "DOWNSCALING")  # states that autoscaling causes, not a deployment
ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # the network is private
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_gcs_server_port_wait_time_s": "240",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # a disconnected node keeps its replicas
    "RAY_health_check_failure_threshold": "40",  # and is not declared dead meanwhile
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_DISABLE_MEMORY_MONITOR": "1",
}


@dataclass(frozen=True, slots=True)
class RayCluster:
    """The deployed cluster and its hosts."""

    hosts: Mapping[str, Host]
    dashboard: RayDashboard
    start_head: Callable[[], None]  # also replaces a killed head, with its disk

    @property
    def address(self) -> str:
        """Address of the orchestrator on the front host."""
        return self.orchestrator_at(FRONT)

    @property
    def addresses(self) -> list[str]:
        """Addresses of both orchestrators."""
        return [self.orchestrator_at(host) for host in (FRONT, DRAFT)]

    def orchestrator_at(self, host: str) -> str:
        """Address of the orchestrator on a host."""
        return f"{self.hosts[host].address}:{ORCHESTRATOR_PORT}"

    @property
    def http_url(self) -> str:
        """URL of Serve's proxy."""
        return f"http://{self.hosts[FRONT].address}:{HTTP_PORT}"

    async def replicas(self, deployment: str) -> list[Replica]:
        """Running replicas of a deployment; none while the dashboard does not answer."""
        found = [each for each in await self.deployments() if each.name == deployment]
        return [replica for each in found for replica in each.replicas if replica.state == "RUNNING"]

    async def deployments(self) -> list[Deployment]:
        """All deployments; none while the dashboard does not answer."""
        try:
            applications = await asyncio.to_thread(self.dashboard.applications)
        except BoughError:
            return []
        return [each for application in applications for each in application.deployments]

    async def server_info(self, address: str) -> ServerInfo | None:
        """GetServerInfo of an orchestrator; None if it does not answer."""
        try:
            async with asyncio.timeout(5), Client(address) as client:
                return await client.server_info()
        except (BoughError, TimeoutError):
            return None

    async def workers_in_use(self, kind: str, address: str = "") -> list[WorkerStatus]:
        """Workers used by the orchestrator at this address, by default the one on the front host."""
        info = await self.server_info(address or self.address)
        workers = info.workers if info else ()
        return [worker for worker in workers if worker.info.kind == kind and not worker.problem]

    async def redeploy(self, config: Mapping[str, Any]) -> None:
        """Deploy a configuration; returns when Serve has applied it and all workers are in use again."""
        await asyncio.to_thread(self.dashboard.deploy, config)
        wanted = {each["name"]: each for each in config["applications"][0]["deployments"]}

        async def is_so() -> bool:
            found = await self.deployments()
            is_settled = len(found) == len(wanted) and all(
                (each.is_healthy or each.status in SCALING) and each.user_config == wanted[each.name]["user_config"]
                for each in found
            )
            return is_settled and all(
                [await self.workers_in_use(kind, address) for kind in (TARGET, DRAFT) for address in self.addresses]
            )

        await until(is_so, "the new configuration")

    async def wait_for(self, deployment: str, kind: str, number: int, but_not: int = 0) -> None:
        """Wait until `num` replicas run, none of them the process `but_not`, and as many workers are in use.

        Raises:
            Unavailable: it takes longer than START_SECONDS.
        """

        async def is_so() -> bool:
            replicas = await self.replicas(deployment)
            is_fresh = all(replica.process_id != but_not for replica in replicas)
            return len(replicas) == number and is_fresh and len(await self.workers_in_use(kind)) == number

        await until(is_so, f"{number} of {deployment}")

    async def kill_host(self, host: str) -> None:
        """Send SIGKILL to every process on a host."""
        for process_id in self.hosts[host].process_ids():
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)

    async def kill_replica(self, deployment: str) -> int:
        """Send SIGKILL to one replica of a deployment; returns its process id."""
        process_id = (await self.replicas(deployment))[0].process_id
        os.kill(process_id, signal.SIGKILL)
        return process_id


async def until(is_so: Callable[[], Any], what: str) -> None:
    """Poll a condition. Raises Unavailable, with the condition's name, after START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    while not await is_so():
        if time.monotonic() > deadline:
            raise Unavailable(f"waited {START_SECONDS:g} s in vain for {what}")
        await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def ray_cluster(config: Mapping[str, Any]) -> AsyncIterator[RayCluster]:
    """Run a head and two more nodes with a deployed configuration; everything ends with the block."""
    with TemporaryDirectory(prefix="bgh") as folder, _waited_for() as started, hosts(*RESOURCES) as machines:
        front = machines[FRONT]

        def start_head() -> None:
            if FRONT in started:  # the head was killed
                started[FRONT].wait()
            head = [f"--port={GCS_PORT}", "--head", "--include-dashboard=true", f"--dashboard-host={front.address}"]
            head += [f"--dashboard-port={DASHBOARD_PORT}", f"--temp-dir={folder}/ray"]
            # Ray mistakes nodes on other hosts for a head on this one, as all are processes of one machine.
            (Path(folder) / "ray" / "ray_current_cluster").unlink(missing_ok=True)
            kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{folder}/gcs"}
            started[FRONT] = _start_node(front, head, Path(folder), kept)

        start_head()
        dashboard = RayDashboard(f"http://{front.address}:{DASHBOARD_PORT}")
        await until(lambda: _has_nodes(dashboard, started, Path(folder)), "the head's dashboard")
        for name in (TARGET, DRAFT):
            started[name] = _start_node(machines[name], [f"--address={front.address}:{GCS_PORT}"], Path(folder))
            # Nodes start one after another: they share a file system and would use the same socket names.
            await until(lambda: _has_nodes(dashboard, started, Path(folder)), "all nodes")
        await asyncio.to_thread(dashboard.deploy, config)
        cluster = RayCluster(machines, dashboard, start_head)
        try:
            await cluster.wait_for("Target", "target", 1)
            await cluster.wait_for("Draft", "draft", 1)
            await cluster.redeploy(config)  # unchanged: waits until both orchestrators use all workers
            yield cluster
        except Unavailable as exc:
            problems = [f"{each.name}: {each.message}" for each in await cluster.deployments() if not each.is_healthy]
            raise Unavailable(f"{exc}: {'; '.join(problems)}") from exc


@contextmanager
def _waited_for() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The processes that the block starts, by host; others end them, and their statuses are collected here."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        yield started
    finally:
        for process in started.values():
            process.wait()


async def _has_nodes(dashboard: RayDashboard, started: Mapping[str, subprocess.Popen[bytes]], folder: Path) -> bool:
    for name, process in started.items():
        if process.poll() is not None:
            raise ConfigError(f"the Ray node on {name} ended:\n{(folder / f'{name}.log').read_text()[-2000:]}")
    try:
        nodes = await asyncio.to_thread(dashboard.nodes)
    except BoughError:
        return False
    return sum(node.is_alive for node in nodes) == len(started)


def _start_node(
    host: Host, flags: list[str], folder: Path, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    resources = ", ".join(f'"{name}": {number}' for name, number in RESOURCES[host.name].items())
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.address}", *flags]
    command += ["--num-cpus=2", "--num-gpus=0", f"--resources={{{resources}}}", "--object-store-memory=80000000"]
    command += ["--disable-usage-stats", "--block"]
    root = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **ENVIRONMENT, **(variables or {}), "PYTHONPATH": path}
    return host.start(command, folder / f"{host.name}.log", environment)
