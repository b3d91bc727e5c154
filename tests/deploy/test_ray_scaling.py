"""Under a real Ray of two nodes: orchestrators are added and taken away by load, and a GPU chooses the node."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from bough.cli.inspection.ray_dashboard import RayDashboard
from bough.client import Client
from bough.config.addresses import free_port
from bough.errors import ConfigError, Unavailable
from bough.registry.registry import Registry
from deploy.check import check, load, require_resources
from loadtest.chaos.streams import Streams, Tally, make_scripts, undisturbed
from loadtest.cluster.ray_cluster import ENVIRONMENT, until
from tests.fakes.supervised import HOST, PROFILE

ROOT = Path(__file__).parents[2]
MOST = 2  # requests for each orchestrator


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of a head without GPUs, and of a node that says it has one: Ray believes it."""
    from ray.cluster_utils import Cluster

    for name, value in {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    common = {"num_cpus": 2, "object_store_memory": 100_000_000}
    port = free_port(HOST)
    head = {"include_dashboard": True, "dashboard_host": HOST, "dashboard_port": port, "num_gpus": 0}
    cluster = Cluster(
        initialize_head=True, head_node_args={**common, **head, "resources": {"index": 1, "orchestrator": 2}}
    )
    try:
        cluster.add_node(**common, num_gpus=1, resources={"target_gpu": 1, "draft_gpu": 1})
        yield RayDashboard(f"http://{HOST}:{port}")
    finally:
        cluster.shutdown()


def config(index_port: int) -> dict[str, Any]:
    """deploy/one-machine.yaml with a target that asks for a GPU, and one orchestrator or two."""
    config = load(ROOT / "deploy" / "one-machine.yaml")
    config["http_options"]["port"] = free_port(HOST)
    index, target, draft, orchestrator = config["applications"][0]["deployments"]
    index["user_config"]["port"] = index_port
    target["ray_actor_options"]["num_gpus"] = 1
    for worker in (target, draft):
        worker["user_config"] = {"program": {"host": HOST, "simulate": str(PROFILE), "drain_seconds": 5}}
    orchestrator["user_config"] = {"program": {"host": HOST, "port": 0, "drain_seconds": 20}}
    del orchestrator["num_replicas"]
    orchestrator["autoscaling_config"] = {
        "min_replicas": 1, "max_replicas": 2, "metrics_interval_s": 1, "look_back_period_s": 4,
        "upscale_delay_s": 1, "downscale_delay_s": 4,
        "policy": {
            "policy_function": "deploy.policies:PerReplica",
            "policy_kwargs": {"metric": "requests", "most": MOST},
        },
    }  # fmt: skip
    check(config)
    return config


async def orchestrators(index_url: str, number: int) -> list[str]:
    """Addresses of the orchestrators once there are so many."""
    found: list[str] = []

    async def are_there() -> bool:
        with suppress(Unavailable):  # the index is still to be placed
            found[:] = [record.address for record in await registry.workers() if record.kind == "orchestrator"]
        return len(found) == number

    registry = Registry(index_url)
    try:
        await until(are_there, f"{number} orchestrators")
    finally:
        await registry.close()
    return found


@pytest.mark.cluster
async def test_orchestrators_follow_the_load_and_a_target_the_gpu(dashboard: RayDashboard) -> None:
    index_port = free_port(HOST)
    wanted, index_url = config(index_port), f"redis://{HOST}:{index_port}"
    scripts = make_scripts(6, rng := random.Random(1), 500, 240)
    nodes = await asyncio.to_thread(dashboard.nodes)
    require_resources(wanted, nodes)
    with pytest.raises(ConfigError, match=r"Target: asks for GPU 1, target_gpu 1; must be on one node \(no node has"):
        require_resources(wanted, tuple(node for node in nodes if not node.resources.get("GPU")))
    await asyncio.to_thread(dashboard.deploy, wanted)
    (first,) = await orchestrators(index_url, 1)
    async with Client(first) as client:
        await until(lambda: has_workers(client), "both workers")
        answers = [await undisturbed(client, script) for script in scripts]
    assert await asyncio.to_thread(gpus_of, dashboard, "Target") == {"0"}, "the one of the only node that has any"
    tally = Tally()
    async with streaming(Streams([first], scripts, answers, "many"), 3 * MOST, rng, tally):
        both = await orchestrators(index_url, 2)
    async with streaming(Streams(both, scripts, answers, "few"), 1, rng, tally):
        await orchestrators(index_url, 1)
    assert tally.finished >= 3 * MOST
    assert not tally.statuses
    assert not tally.unclear
    assert (tally.hung, tally.unequal, tally.lost_tokens, tally.repeated_tokens) == (0, 0, 0, 0)


async def has_workers(client: Client) -> bool:
    info = await client.server_info()
    return {worker.info.kind for worker in info.workers if not worker.problem} == {"target", "draft"}


def gpus_of(dashboard: RayDashboard, deployment: str) -> set[str]:
    """CUDA_VISIBLE_DEVICES of the programs below a deployment's replicas."""
    ours = [each for application in dashboard.applications() for each in application.deployments]
    replicas = [replica.process_id for each in ours if each.name == deployment for replica in each.replicas]
    tasks = [task for number in replicas for task in Path(f"/proc/{number}/task").glob("*/children")]
    programs = [number for task in tasks for number in task.read_text().split()]
    lines = [line for number in programs for line in Path(f"/proc/{number}/environ").read_text().split("\0")]
    return {line.partition("=")[2] for line in lines if line.startswith("CUDA_VISIBLE_DEVICES=")}


@asynccontextmanager
async def streaming(streams: Streams, number: int, rng: random.Random, tally: Tally) -> AsyncIterator[None]:
    """Keep so many streams running; those that run at the end may finish."""
    streams.tally = tally
    running = asyncio.create_task(streams.run(number, rng))
    try:
        yield
    finally:
        streams.stop()
        await running
