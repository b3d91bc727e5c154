"""`bough doctor`: reports the orchestrator, workers and models that run, and problems."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bough import __version__
from bough.cli.flags.reaching import client_from, with_hint
from bough.config.addresses import is_wildcard, joined
from bough.config.processes import DEFAULT_PORT
from bough.errors import BoughError, ConfigError, Unauthenticated
from bough.health.problems import find_problems
from bough.health.ray_dashboard import Application, Deployment, Node, RayDashboard
from bough.protocol.decision import DraftCalibration
from bough.protocol.generation import Loads, WorkerStatus
from bough.runtime.exit_status import FAILED
from bough.runtime.log_lines import on_one_line, quoted_lines, say

REFUSED = "it runs and requires a key: BOUGH_API_KEY must be one of its API keys"
ORCHESTRATOR = "Orchestrator"  # name of the deployment


async def doctor(arguments: argparse.Namespace) -> int:
    """Print a report; exit status 1 if there are problems."""
    if arguments.json:
        return await _as_json(arguments)
    problems, found = await report_cluster(arguments.ray) if arguments.ray else ([], [])
    address = ",".join(found) or arguments.address
    async with client_from(arguments, *address.split(",")) as client:
        try:
            server, loads = await client.server_info(), await client.loads()
            calibrations = {one.draft_id: one for one in await client.calibrations()}
        except BoughError as exc:
            return _conclude([*problems, _problem(address, exc)])
    say(f"python        {sys.version.split()[0]}, bough {__version__}")
    say(f"orchestrator  {client.address}, bough {server.bough_version}; {_describe_loads(loads)}")
    if server.http_url:
        say(f"              OpenAI's clients at {server.http_url}/v1")
    if server.metrics_url:
        say(f"              metrics at {server.metrics_url}")
    say(f"index         {server.index_url}")
    for worker in server.workers:
        _print_worker(worker)
        if worker.info.worker_id in calibrations:
            say(f"              {_describe_calibration(calibrations[worker.info.worker_id])}")
    if server.is_draftless:
        say("draft         none, as configured: guesses come from a session's own text")
    return _conclude([*problems, *find_problems(server)])


async def _as_json(arguments: argparse.Namespace) -> int:
    """Print the report as one JSON line."""
    if arguments.ray:
        raise ConfigError(f"--json: must not be given with --ray, got {arguments.ray}")
    async with client_from(arguments) as client:
        report: dict[str, Any] = {"bough_version": __version__, "address": client.address}
        try:
            server = await client.server_info()
            report |= {"server": asdict(server), "loads": asdict(await client.loads())}
            report["calibrations"] = [asdict(one) for one in await client.calibrations()]
            problems = find_problems(server)
        except BoughError as exc:
            problems = [_problem(client.address, exc)]
    print(json.dumps({**report, "problems": problems}))
    return FAILED if problems else 0


def _problem(address: str, error: BoughError) -> str:
    """Why an orchestrator returns no information, on one line, as the text may come from a stranger."""
    return on_one_line(f"{address}: {error}; {REFUSED}" if isinstance(error, Unauthenticated) else with_hint(error))


def _conclude(problems: list[str]) -> int:
    for problem in problems:
        say(*quoted_lines(f"problem: {problem}"))
    if not problems:
        say("all is well")
    return FAILED if problems else 0


def _describe_loads(loads: Loads) -> str:
    return (
        f"{loads.num_requests_running} running, {loads.num_requests_waiting} waiting, "
        f"{loads.num_requests_total} ended, {loads.num_tokens_total} tokens"
    )


def _describe_calibration(calibration: DraftCalibration) -> str:
    return (
        f"{calibration.realised_tokens:.2f} tokens a round of {calibration.realised_seconds:.3f} s, where "
        f"{calibration.expected_tokens:.2f} tokens and {calibration.expected_seconds:.3f} s were expected "
        f"({calibration.num_rounds} rounds)"
    )


def _print_worker(worker: WorkerStatus) -> None:
    info, limit = worker.info, f" (limited by {worker.info.context_limit})" if worker.info.context_limit else ""
    say(f"{info.kind:13} {worker.address}, {info.worker_id}, bough {info.bough_version}")
    say(f"              {info.model_name} ({info.model_description}), fingerprint {info.model_fingerprint}")
    if info.kind == "target":
        say(f"              weights {info.weights_hash or 'hash not ready: they are still being read'}")
    say(
        f"              context {info.max_context}{limit}, trees up to {info.max_nodes} nodes, "
        f"{info.num_sessions} sessions, KV {info.kv_used_bytes / 1e9:.2f} of {info.kv_bytes / 1e9:.2f} GB"
    )
    if info.link_bytes_per_pass:
        say(f"              {info.link_bytes_per_pass / 1e9:.2f} GB over the link in every sweep, at most")
    for number, stage in enumerate(info.stages, start=1):
        say(
            f"              stage {number} at {stage.address}: layers {stage.first_layer} to {stage.end_layer - 1}, "
            f"{stage.memory_bytes / 1e9:.2f} GB; last sweep: {stage.queue_ns / 1e9:.3f} s waiting for the one before, "
            f"{stage.wait_ns / 1e9:.3f} s for weights, {stage.compute_ns / 1e9:.3f} s computing"
        )
    if info.stages:
        say(f"              between the stages: {info.stage_network_ns / 1e9:.3f} s of the last sweep")
    for note in info.notes:
        say(f"              {note}")


async def report_cluster(url: str) -> tuple[list[str], list[str]]:
    """Print nodes and replicas; returns problems, and the addresses of orchestrators."""
    dashboard = RayDashboard(url)
    try:
        nodes = await asyncio.to_thread(dashboard.nodes)
        applications = await asyncio.to_thread(dashboard.applications)
    except BoughError as exc:
        return [str(exc)], []
    for node in nodes:
        say(f"node          {node.host}, {'alive' if node.is_alive else 'dead'}; {node.describe_resources()}")
    for application in applications:
        say(f"application   {application.name}, {application.status.lower()}")
        for deployment in application.deployments:
            _print_deployment(deployment)
    if not applications:
        say("application   none: `serve deploy deploy/cluster.yaml` would deploy one")
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
    say(f"  {deployment.name:13}{deployment.status.lower()}, {running} of {deployment.num_wanted} replicas run")
    for replica in deployment.replicas:
        where = f"on {replica.host}, process {replica.process_id}" if replica.host else "not placed yet"
        say(f"              {replica.state.lower()} {where}")
