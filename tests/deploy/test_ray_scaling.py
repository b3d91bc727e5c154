"""Under a real Ray of two nodes: orchestrators follow the load, a GPU chooses the node, a redeploy fails no request."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray")

from bough.client import Client
from bough.config.addresses import free_port
from bough.errors import ConfigError, Unavailable
from bough.health.ray_dashboard import RayDashboard
from bough.registry.registry import Registry
from deploy.check import check, load, require_resources
from deploy.settings import PORTS
from loadtest.chaos.streams import Streams, Tally, make_scripts, undisturbed
from loadtest.cluster.ray_cluster import ENVIRONMENT, until
from tests.fakes.processes.supervised import HOST, PROFILE

ROOT = Path(__file__).parents[2]
MOST = 2  # requests for each orchestrator
OTHERS_SECONDS = 25.0  # for which a program drains that is no orchestrator: streams must outlast it
SWEEP_SECONDS = 0.5  # so that they do
LONG, SHORT = 250, 8  # tokens of streams


@contextmanager
def ray_nodes(
    monkeypatch: pytest.MonkeyPatch, first: dict[str, int], second: dict[str, int], num_gpus: int = 0
) -> Iterator[RayDashboard]:
    """Two nodes with these resources; the second says that it has GPUs, which Ray believes."""
    from ray.cluster_utils import Cluster

    for name, value in {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    common = {"num_cpus": 2, "object_store_memory": 100_000_000}
    port = free_port(HOST)
    head = {"include_dashboard": True, "dashboard_host": HOST, "dashboard_port": port, "num_gpus": 0}
    cluster = Cluster(initialize_head=True, head_node_args={**common, **head, "resources": first})
    try:
        cluster.add_node(**common, num_gpus=num_gpus, resources=second)
        yield RayDashboard(f"http://{HOST}:{port}")
    finally:
        cluster.shutdown()


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Any:
    with ray_nodes(
        monkeypatch, {"index": 1, "orchestrator": 2}, {"target_gpu": 1, "draft_gpu": 1}, num_gpus=1
    ) as dashboard:
        yield dashboard


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
    """Addresses of the orchestrators once there are this many."""
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
async def test_orchestrators_scale_with_the_load_and_a_target_with_the_gpu(dashboard: RayDashboard) -> None:
    index_port = free_port(HOST)
    wanted, index_url = config(index_port), f"redis://{HOST}:{index_port}"
    scripts = make_scripts(6, rng := random.Random(1), 500, 240)
    nodes = await asyncio.to_thread(dashboard.nodes)
    require_resources(wanted, nodes)
    with pytest.raises(ConfigError, match=r"Target: requests GPU 1, target_gpu 1; must be on one node \(no node has"):
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
    programs = programs_of(dashboard, deployment)
    lines = [line for number in programs for line in Path(f"/proc/{number}/environ").read_text().split("\0")]
    return {line.partition("=")[2] for line in lines if line.startswith("CUDA_VISIBLE_DEVICES=")}


def programs_of(dashboard: RayDashboard, deployment: str) -> list[int]:
    """Process ids of the programs below a deployment's replicas."""
    ours = [each for application in dashboard.applications() for each in application.deployments]
    replicas = [replica.process_id for each in ours if each.name == deployment for replica in each.replicas]
    tasks = [task for number in replicas for task in Path(f"/proc/{number}/task").glob("*/children")]
    return [int(number) for task in tasks for number in task.read_text().split()]


@asynccontextmanager
async def streaming(streams: Streams, number: int, rng: random.Random, tally: Tally) -> AsyncIterator[None]:
    """Keep this many streams running; those that run at the end may finish."""
    streams.tally = tally
    running = asyncio.create_task(streams.run(number, rng))
    try:
        yield
    finally:
        streams.stop()
        await running


def slow_config(index_port: int, num_orchestrators: int, folder: Path) -> dict[str, Any]:
    """`config` with slow sweeps, and orchestrators that are not scaled: one with fixed ports, or several."""
    wanted = config(index_port)
    _, target, draft, orchestrator = wanted["applications"][0]["deployments"]
    profile = json.loads(PROFILE.read_text())
    profile["target"]["link_seconds"] = SWEEP_SECONDS
    slow = folder / "slow.json"
    slow.write_text(json.dumps(profile))
    for worker in (target, draft):
        worker["user_config"]["program"]["simulate"] = str(slow)
    del orchestrator["autoscaling_config"]
    orchestrator["num_replicas"] = num_orchestrators
    ports = {name: free_port(HOST) if num_orchestrators == 1 else 0 for name in PORTS}
    orchestrator["user_config"] = {"program": {"host": HOST, **ports}}
    check(wanted)
    return wanted


async def redeployed(dashboard: RayDashboard, registry: Registry, wanted: dict[str, Any], name: str) -> set[str]:
    """Deploy another setting for one program; return the ids of those that others have taken the place of by then."""
    (deployment,) = [each for each in wanted["applications"][0]["deployments"] if each["name"] == name]
    deployment["user_config"]["program"]["max_waiting"] = 1000
    before = await ids_of(registry, name.lower())

    async def is_so() -> bool:
        now = await ids_of(registry, name.lower())
        return len(now) == len(before) and not now & before

    await asyncio.to_thread(dashboard.deploy, wanted)
    await until(is_so, f"another {name}")
    return before


async def ids_of(registry: Registry, kind: str) -> set[str]:
    return {record.worker_id for record in await registry.workers() if record.kind == kind}


async def text_of(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str:
    """The text of a stream that must be whole."""
    text, is_whole = "", False
    async with http.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            is_whole = line == "data: [DONE]" or (is_whole and not line)
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
    assert is_whole, text
    return text


async def is_answered(http: httpx.AsyncClient, url: str) -> bool:
    with suppress(httpx.HTTPError):
        return (await http.get(f"{url}/health")).status_code == 200
    return False


@pytest.mark.cluster
@pytest.mark.parametrize("num_orchestrators", [1, 2])
async def test_a_redeploy_fails_no_http_stream(dashboard: RayDashboard, tmp_path: Path, num_orchestrators: int) -> None:
    """One orchestrator's ports go to its successor, two are replaced in turn; then the draft worker, and the target.

    Short streams come all the while, and long ones began before: by Serve's proxy, and at an orchestrator's own port.
    """
    index_port = free_port(HOST)
    wanted = slow_config(index_port, num_orchestrators, tmp_path)
    common = {"prompt": "Why is the sky blue?", "temperature": 0.8, "ignore_eos": True}
    longs = [common | {"seed": seed, "max_tokens": LONG} for seed in range(3)]
    shorts = [common | {"seed": seed, "max_tokens": SHORT} for seed in range(3)]
    registry, proxy = Registry(f"redis://{HOST}:{index_port}"), f"http://{HOST}:{wanted['http_options']['port']}"
    over, num_short = asyncio.Event(), 0
    await asyncio.to_thread(dashboard.deploy, wanted)

    async def come(http: httpx.AsyncClient, body: dict[str, Any], answer: str) -> None:
        nonlocal num_short
        while not over.is_set():
            assert await text_of(http, proxy, body) == answer
            num_short += 1

    async def last(http: httpx.AsyncClient, url: str, body: dict[str, Any], answer: str) -> float:
        assert await text_of(http, url, body) == answer
        return time.monotonic()

    addresses = await orchestrators(f"redis://{HOST}:{index_port}", num_orchestrators)
    for address in addresses:
        async with Client(address) as client:
            await until(lambda client=client: has_workers(client), "both workers")
            own_url = (await client.server_info()).http_url
    async with httpx.AsyncClient(trust_env=False, timeout=None) as http:
        await until(lambda: is_answered(http, proxy), "Serve's proxy")
        answers = await asyncio.gather(*(text_of(http, proxy, body) for body in (*longs, *shorts)))
        async with asyncio.TaskGroup() as group:
            urls = (proxy, proxy, own_url)
            lasting = [group.create_task(last(http, *each)) for each in zip(urls, longs, answers, strict=False)]
            for body, answer in zip(shorts, answers[len(longs) :], strict=True):
                group.create_task(come(http, body, answer))
            await asyncio.sleep(4 * SWEEP_SECONDS)
            began = time.monotonic()
            gone = await redeployed(dashboard, registry, wanted, "Orchestrator")
            for name in ("Draft", "Target"):
                await redeployed(dashboard, registry, wanted, name)
            assert min([await each for each in lasting]) - began > OTHERS_SECONDS
            over.set()
    assert num_short > len(shorts)
    process_ids = [worker_id.split("-")[1] for worker_id in gone]
    await until(lambda: no_longer_there(process_ids), "the orchestrators that were replaced to end")
    await registry.close()


async def no_longer_there(process_ids: list[str]) -> bool:
    return not any(Path(f"/proc/{number}").exists() for number in process_ids)
