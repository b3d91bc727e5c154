"""One machine under Ray Serve: a Ray node of its own, what is deployed there, and how to ask it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from bough.cli.inspection.doctor import find_problems
from bough.cli.inspection.ray_dashboard import Application, Node, RayDashboard
from bough.cli.machine.up import ensure_demonstration
from bough.client import Client
from bough.config.processes import DEFAULT_PORT
from bough.errors import BoughError, ConfigError, Unauthenticated, Unavailable
from bough.simulation.profile import load_profile
from deploy.check import check, load, require_resources
from deploy.settings import DEMONSTRATION, INDEX, INDEX_PORT, Role

HOST = "127.0.0.1"
DEFAULT_HTTP_PORT = 8000
POLL_SECONDS = 1.0
START_SECONDS = 120.0  # until the dashboard answers
STOP_SECONDS = 60.0  # until all replicas have drained
OBJECT_STORE_BYTES = 100 * 1000**2  # the least that Ray takes: nothing of ours goes through it
NUM_RESOURCES = 8  # of each kind that a deployment asks for: on one machine nothing is to be kept apart


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. Of that class, for asyncio would log any other that a callback raises, and go on."""


def run(file: Path, simulate: str, port: int | None, dashboard_port: int) -> None:
    """Serves until a signal.

    Raises:
        Stopped: that signal.
        BoughError: something is wrong that the user can mend.
    """
    catch_signals()
    if simulate:
        load_profile(simulate)  # whatever is wrong with it is said before anything is started
    config = load(file)
    adapt(config, simulate, port)
    check(config)
    require_free_ports(config, dashboard_port)
    if _uses_demonstration(config):
        ensure_demonstration()
    with ray_node(config, dashboard_port) as dashboard:
        serve(config, dashboard)


def adapt(config: dict[str, Any], simulate: str, port: int | None) -> None:
    """Puts what the command line says into a configuration."""
    if port is not None:
        config.setdefault("http_options", {})["port"] = port
    for deployment in _deployments(config):
        if simulate and deployment["name"] in (Role.TARGET.value, Role.DRAFT.value):
            profile = str(Path(simulate).absolute()) if Path(simulate).is_file() else simulate
            deployment["user_config"] = {**deployment["user_config"], "program": {"host": HOST, "simulate": profile}}


def require_free_ports(config: Mapping[str, Any], dashboard_port: int) -> None:
    """Raises ConfigError, naming the setting, for a port that something else listens on."""
    ports = {"--dashboard-port": dashboard_port, "--port (or http_options.port)": _http_port(config)}
    for deployment in _deployments(config):
        name, settings = deployment["name"], deployment.get("user_config", {})
        if name == INDEX:
            ports["Index.user_config.port"] = settings.get("port", INDEX_PORT)
        else:
            program = settings.get("program", {})
            ports |= {f"{name}.user_config.program.{key}": program.get(key, 0) for key in ("port", "http_port")}
    for where, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, max(port, 0)))
            except OSError as exc:
                raise ConfigError(f"{where}: value was {port}; must be a free port ({exc.strerror})") from exc


@contextmanager
def ray_node(config: Mapping[str, Any], dashboard_port: int) -> Iterator[RayDashboard]:
    """A Ray cluster of one node, which has what the configuration asks for; it ends with the block."""
    names = {name for deployment in _deployments(config) for name in _resources(deployment)}
    print("starting a Ray node", file=sys.stderr, flush=True)
    ray.init(
        address="local",  # whatever RAY_ADDRESS names, or runs on this machine already
        num_cpus=max(2, os.cpu_count() or 1),
        resources={name: float(NUM_RESOURCES) for name in names},
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=True,
        dashboard_host=HOST,
        dashboard_port=dashboard_port,
        log_to_driver=False,
        logging_level="ERROR",
    )
    catch_signals()  # Ray has put handlers of its own in their place
    dashboard = RayDashboard(f"http://{HOST}:{dashboard_port}")
    try:
        yield dashboard
    finally:
        _stop(dashboard)
        ray.shutdown()


def serve(config: Mapping[str, Any], dashboard: RayDashboard) -> None:
    """Deploys and watches, until a signal. Raises ConfigError where Serve gives it up."""
    require_resources(config, _nodes_when_known(dashboard))
    dashboard.deploy(config)
    said, is_ready = "", False
    while True:
        try:
            waiting = waits_for(dashboard.applications(), orchestrator_address(config))
        except Unavailable as exc:  # what is deployed goes on without the dashboard
            waiting = str(exc)
        if not waiting and not is_ready:
            is_ready = True
            print(how_to_ask(config, dashboard.url), flush=True)
        elif waiting and waiting != said:
            print(f"waiting: {waiting}", file=sys.stderr, flush=True)
        said = waiting
        time.sleep(POLL_SECONDS)


def waits_for(applications: Sequence[Application], address: str) -> str:
    """Why no request could be served yet; empty where one could. Raises ConfigError where one never will."""
    for application in applications:
        if application.status == "DEPLOY_FAILED":
            raise ConfigError(f"{application.name}: {application.problem}")
    unhealthy = [each for application in applications for each in application.deployments if not each.is_healthy]
    if unhealthy:
        return ", ".join(f"{each.name} ({each.message or each.status.lower()})" for each in unhealthy)
    if not applications or any(application.status != "RUNNING" for application in applications):
        return "Serve to take the application in"
    return asyncio.run(_unused_workers(address))


async def _unused_workers(address: str) -> str:
    """What the orchestrator waits for."""
    async with Client(address) as client:
        try:
            problems = find_problems(await client.server_info())
        except Unauthenticated:  # it asks for a key that this process need not have: it is there
            return ""
        except BoughError as exc:
            return f"the orchestrator ({exc})"
    return "; ".join(problems)


def orchestrator_address(config: Mapping[str, Any]) -> str:
    """Where gRPC clients find it. Raises ConfigError where that is left open."""
    for deployment in _deployments(config):
        port = (deployment.get("user_config") or {}).get("program", {}).get("port", DEFAULT_PORT)
        if deployment["name"] == Role.ORCHESTRATOR.value and port:
            return f"{HOST}:{port}"
    raise ConfigError("Orchestrator.user_config.program.port: value was 0; must be fixed, for clients to find it")


def how_to_ask(config: Mapping[str, Any], dashboard_url: str) -> str:
    """Three calls that work as they stand."""
    base = f"http://{HOST}:{_http_port(config)}/v1"
    return TEXT.format(base=base, address=orchestrator_address(config), dashboard=dashboard_url)


TEXT = """ready; three ways to ask, from another terminal:

curl -N {base}/chat/completions -H 'content-type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 64, "stream": true}}'

python -c '
from openai import OpenAI
client = OpenAI(base_url="{base}", api_key="none")
model = client.models.list().data[0].id
messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=64, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
'

bough generate --address {address} "Why is the sky blue?"

bough doctor --address {address} --ray {dashboard} shows nodes, replicas and workers. Ctrl-C ends everything."""


def _nodes_when_known(dashboard: RayDashboard) -> tuple[Node, ...]:
    """The dashboard comes up after its node. Raises Unavailable where it knows of none in time."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        problem = f"the Ray dashboard at {dashboard.url} knows of no node"
        try:
            if nodes := dashboard.nodes():
                return nodes
        except Unavailable as exc:
            problem = str(exc)
        if time.monotonic() > deadline:
            raise Unavailable(problem)
        time.sleep(POLL_SECONDS)


def _stop(dashboard: RayDashboard) -> None:
    """Lets every replica drain. A second Ctrl-C does not wait for that."""
    print("ending everything; what runs may finish", file=sys.stderr, flush=True)
    deadline = time.monotonic() + STOP_SECONDS
    with suppress(Unavailable, ConfigError, Stopped):
        dashboard.shut_down()
        while dashboard.applications() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def _http_port(config: Mapping[str, Any]) -> int:
    return int((config.get("http_options") or {}).get("port", DEFAULT_HTTP_PORT))


def _deployments(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [each for application in config["applications"] for each in application.get("deployments", ())]


def _resources(deployment: Mapping[str, Any]) -> Mapping[str, float]:
    return (deployment.get("ray_actor_options") or {}).get("resources") or {}


def _uses_demonstration(config: Mapping[str, Any]) -> bool:
    programs = [(each.get("user_config") or {}).get("program", {}) for each in _deployments(config)]
    return any(program.get("model") == DEMONSTRATION for program in programs)


def catch_signals() -> None:
    """SIGTERM and Ctrl-C raise Stopped in the main thread."""

    def stop(*_: object) -> None:
        raise Stopped

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
