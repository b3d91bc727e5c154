"""The report of `bough doctor --ray URL` on a Ray cluster: its nodes and Serve's replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bough.cli.inspection.ray_dashboard import Application, Deployment, Node, RayDashboard
from bough.config.addresses import is_wildcard, joined
from bough.config.processes import DEFAULT_PORT
from bough.errors import BoughError

ORCHESTRATOR = "Orchestrator"  # name of the deployment


async def report_cluster(url: str) -> tuple[list[str], list[str]]:
    """Print nodes and replicas; returns problems, and the addresses of orchestrators."""
    dashboard = RayDashboard(url)
    try:
        nodes = await asyncio.to_thread(dashboard.nodes)
        applications = await asyncio.to_thread(dashboard.applications)
    except BoughError as exc:
        return [str(exc)], []
    for node in nodes:
        print(f"node          {node.host}, {'alive' if node.is_alive else 'dead'}; {node.describe_resources()}")
    for application in applications:
        print(f"application   {application.name}, {application.status.lower()}")
        for deployment in application.deployments:
            _print_deployment(deployment)
    if not applications:
        print("application   none: `serve deploy deploy/cluster.yaml` would deploy one")
    return cluster_problems(nodes, applications), orchestrators(applications)


def cluster_problems(nodes: Sequence[Node], applications: Sequence[Application]) -> list[str]:
    """Problems, one sentence each; dead nodes are ignored if a live node has the same address."""
    alive = {node.host for node in nodes if node.is_alive}
    problems = [f"node {node.host} is dead: {node.problem}" for node in nodes if node.host not in alive]
    return problems + [f"application {each.name}: {each.problem}" for each in applications if each.problem]


def orchestrators(applications: Sequence[Application]) -> list[str]:
    """Addresses of running orchestrators with a fixed port."""
    addresses = []
    for application in applications:
        for deployment in application.deployments:
            program = deployment.user_config.get("program", {})
            host, port = program.get("host") or "", program.get("port", DEFAULT_PORT)
            if deployment.name == ORCHESTRATOR and port:
                running = [replica for replica in deployment.replicas if replica.state == "RUNNING"]
                hosts = [replica.host if is_wildcard(host) else host for replica in running]
                addresses += [joined(each, port) for each in hosts]
    return addresses


def _print_deployment(deployment: Deployment) -> None:
    running = sum(replica.state == "RUNNING" for replica in deployment.replicas)
    print(f"  {deployment.name:13}{deployment.status.lower()}, {running} of {deployment.num_wanted} replicas run")
    for replica in deployment.replicas:
        where = f"on {replica.host}, process {replica.process_id}" if replica.host else "not placed yet"
        print(f"              {replica.state.lower()} {where}")
