"""Under a real Ray of two nodes: a target whose layers are on both has the tokens of one process."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from bough.client import Client
from bough.config.addresses import free_port
from bough.errors import BoughError
from bough.health.ray_dashboard import RayDashboard
from bough.processes.launch import Cluster as Processes
from bough.protocol.generation import GenerateOptions, WorkerInfo
from deploy.check import check, load, require_resources
from loadtest.cluster.ray_cluster import until
from tests.deploy.test_ray_scaling import ROOT, programs_of, ray_nodes
from tests.fakes.processes.supervised import HOST
from tests.fakes.streams import read

SAMPLED = GenerateOptions(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
STREAMS = [SAMPLED, replace(SAMPLED, temperature=0.0)]


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Any:
    resources = {"index": 1, "orchestrator": 1, "target_gpu": 1}, {"stage_gpu": 1}
    with ray_nodes(monkeypatch, *resources) as dashboard:
        yield dashboard


def config(model: Path, port: int) -> dict[str, Any]:
    """deploy/staged-target.yaml with a tiny model, no draft and no GPUs."""
    config = load(ROOT / "deploy" / "staged-target.yaml")
    config["http_options"] |= {"host": HOST, "port": free_port(HOST)}
    (application,) = config["applications"]
    application["args"]["drafts"] = False
    deployments = {each["name"]: each for each in application["deployments"] if each["name"] != "Draft"}
    application["deployments"] = [*deployments.values()]
    deployments["Index"]["user_config"] = {"host": HOST, "port": free_port(HOST)}
    common = {"host": HOST, "model": str(model), "dtype": "float32", "resident_layers": 0}
    deployments["Target"]["user_config"]["program"] = {**common, "port": free_port(HOST), "max_nodes": 32}
    deployments["Stage"]["user_config"]["program"] = common
    deployments["Orchestrator"]["user_config"]["program"] = {"host": HOST, "port": port}
    for name in ("Target", "Stage"):
        del deployments[name]["ray_actor_options"]["num_gpus"]
    check(config)
    return config


@pytest.mark.cluster
async def test_a_staged_target_has_the_tokens_of_one_process_also_after_its_programs_were_killed(
    dashboard: RayDashboard, tiny: Path, tiny_cluster: Processes
) -> None:
    """The head is found by its stage, and again after each of them was killed; its new program keeps the stage's."""
    async with Client(tiny_cluster.address) as client:
        wanted = [(await read(client, options)).token_ids for options in STREAMS]
    deployed = config(tiny, port := free_port(HOST))
    require_resources(deployed, await asyncio.to_thread(dashboard.nodes))
    await asyncio.to_thread(dashboard.deploy, deployed)
    async with Client(f"{HOST}:{port}") as client:
        await until(lambda: is_served(client), "a target")
        (stage,) = (await target_of(client)).stages
        assert stage.address.startswith(HOST)
        for name in ("Stage", "Target"):
            assert [(await read(client, options)).token_ids for options in STREAMS] == wanted
            before = await asyncio.to_thread(programs_of, dashboard, "Stage")
            (program,) = await asyncio.to_thread(programs_of, dashboard, name)
            os.kill(program, signal.SIGKILL)
        assert [(await read(client, options)).token_ids for options in STREAMS] == wanted
        assert await asyncio.to_thread(programs_of, dashboard, "Stage") == before


async def target_of(client: Client) -> WorkerInfo:
    (target,) = (await client.server_info()).workers
    return target.info


async def is_served(client: Client) -> bool:
    with suppress(BoughError, ValueError):
        return bool((await target_of(client)).stages)
    return False
