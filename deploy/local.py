"""bough under Ray Serve on one machine: starts a Ray node, deploys on it, and says how to send requests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import ray
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray.exceptions import RayError
from ray.serve.context import _get_global_client

from bough.config.addresses import bound
from bough.config.parsers import MAX_PORT, number
from bough.config.processes import ServiceConfig
from bough.errors import BoughError, ConfigError, Unauthenticated, Unavailable
from bough.health.problems import find_problems
from bough.health.ray_dashboard import TIMEOUT_SECONDS, Application, Node, RayDashboard
from bough.processes.demonstration import ensure_demonstration
from bough.runtime.log_lines import quoted_lines, say
from bough.simulation.profile import load_profile
from deploy.check import HAPROXY, check, load, orchestrator_of, require_resources, uses_haproxy
from deploy.endpoints import HOST, PROGRAM, Endpoints, http_port
from deploy.settings import DEMONSTRATION, INDEX, INDEX_PORT, PORTS, Role

POLL_SECONDS = 1.0
START_SECONDS = 120.0  # for the dashboard to answer
STOP_SECONDS = 60.0  # for all replicas to drain
DRAIN_SECONDS = 25.0  # of an orchestrator: whoever presses Ctrl-C does not want to wait for ten minutes
OBJECT_STORE_BYTES = 100 * 1000**2  # the least that Ray takes: nothing of ours goes through it
OF_ALL = frozenset(f.name for f in fields(ServiceConfig))  # settings that a worker without weights has, too
HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": "8404", "RAY_SERVE_HAPROXY_METRICS_PORT": "9101"}  # Ray's defaults
HAPROXY_SCRIPT = Path(__file__).with_name("haproxy.sh")
parse_any_port = number(int, -1, MAX_PORT)
NUM_RESOURCES = 8  # of each kind that a deployment asks for: more than it needs, as there is one node only
TAKING_IN = "Serve to take the application in"


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. A KeyboardInterrupt, as asyncio logs and drops other exceptions of its callbacks."""


def run(file: Path, simulate: str, port: int | None, dashboard_port: int) -> None:
    """Serve until a signal, which raises Stopped. Raise BoughError where the user has to correct something."""
    catch_signals()
    if simulate:
        load_profile(simulate)  # errors in it are reported before anything starts
    config = load(file)
    adapt(config, simulate, port)
    check(config)
    endpoints = Endpoints.of(config)
    if uses_haproxy():
        end_haproxy_with_ray()
    require_free_ports(config, dashboard_port)
    require_resources(config, (node_to_be(config),))  # a node takes minutes to start on a busy machine
    if _uses_demonstration(config):
        ensure_demonstration()
    with ray_node(config, dashboard_port) as dashboard:
        serve(config, dashboard, endpoints)


def adapt(config: dict[str, Any], simulate: str, port: int | None) -> None:
    """Apply the command line and defaults of one machine to a configuration.

    Serve's proxy gets the orchestrator's certificate.
    """
    options = config.setdefault("http_options", {})
    if port is not None:
        if config.get("proxy_location") == "Disabled":
            message = f"--port: must be left out with proxy_location: Disabled, got {port}; {PROGRAM}.http_port sets it"
            raise ConfigError(message)
        options["port"] = port
    orchestrator = orchestrator_of(config, os.environ)
    if orchestrator.tls_cert:
        options.setdefault("ssl_certfile", orchestrator.tls_cert)
        options.setdefault("ssl_keyfile", orchestrator.tls_key)
    for deployment in _deployments(config):
        if deployment["name"] == Role.ORCHESTRATOR.value:
            own = deployment.get("user_config", {})
            program = {"host": HOST, "drain_seconds": DRAIN_SECONDS, **own.get("program", {})}
            deployment["user_config"] = {**own, "program": program}
        if simulate and deployment["name"] in (Role.TARGET.value, Role.DRAFT.value):
            profile = str(Path(simulate).absolute()) if Path(simulate).is_file() else simulate
            program = {name: value for name, value in deployment["user_config"]["program"].items() if name in OF_ALL}
            program |= {"host": HOST, "simulate": profile}
            deployment["user_config"] = {**deployment["user_config"], "program": program}


def require_free_ports(config: Mapping[str, Any], dashboard_port: int) -> None:
    """Raise ConfigError, naming the setting, for a port that is given twice or in use."""
    ports: dict[str, Any] = {"--dashboard-port": dashboard_port}
    if config.get("proxy_location") != "Disabled":
        ports["--port (or http_options.port)"] = http_port(config)
    for deployment in _deployments(config):
        name, settings = deployment["name"], deployment.get("user_config", {})
        if name == INDEX:
            ports["Index.user_config.port"] = settings.get("port", INDEX_PORT)
        else:
            program = settings.get("program", {})
            ports |= {f"{name}.user_config.program.{key}": program.get(key, 0) for key in PORTS}
    if uses_haproxy():
        ports |= {name: os.environ.get(name, default) for name, default in HAPROXY_PORTS.items()}
    taken: dict[int, str] = {}
    for where, given in ports.items():
        try:
            port = max(parse_any_port(str(given)), 0)
            bound(HOST, port).close()
        except ValueError as exc:
            raise ConfigError(f"{where}: {exc}, got {given!r}") from exc
        except OSError as exc:
            raise ConfigError(f"{where}: must be a free port, got {port} ({exc.strerror})") from exc
        if port and taken.setdefault(port, where) != where:
            raise ConfigError(f"{where}: must be another port than {taken[port]}, got {port} for both")


def end_haproxy_with_ray() -> None:
    """Have Ray run HAProxy through a script by which it ends with Ray's process.

    Raise ConfigError where Ray finds no HAProxy: it would serve without any HTTP port, and say so in a log alone.
    """
    from ray.serve._private.haproxy import get_haproxy_binary  # loads jinja2, for those who use it

    try:
        binary = get_haproxy_binary()
    except FileNotFoundError as exc:
        raise ConfigError(f"--haproxy (or {HAPROXY}): must have an HAProxy to run: {exc}") from exc
    if binary != str(HAPROXY_SCRIPT):  # else it is inherited, and would run itself
        os.environ["BOUGH_HAPROXY"] = binary
    os.environ |= {"BOUGH_PYTHON": sys.executable, "RAY_SERVE_HAPROXY_BINARY_PATH": str(HAPROXY_SCRIPT)}


@contextmanager
def ray_node(config: Mapping[str, Any], dashboard_port: int) -> Iterator[RayDashboard]:
    """Run a Ray cluster of one node with the resources that the configuration asks for, until the block ends.

    Raise Unavailable where a part of it does not start within Ray's own limits, two of which `deploy.up` sets.
    """
    print("starting a Ray node, for which a busy machine may take minutes", file=sys.stderr, flush=True)
    try:
        ray.init(
            address="local",  # a new cluster, even if RAY_ADDRESS names one or one runs here
            **_node_options(config),
            include_dashboard=True,
            dashboard_host=HOST,
            dashboard_port=dashboard_port,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except Exception as exc:  # Ray raises plain ones where a part of its node is not there in time
        ray.shutdown()
        raise Unavailable(f"the Ray node did not start: {exc}") from exc
    catch_signals()  # again, as Ray has replaced the handlers
    dashboard = RayDashboard(f"http://{HOST}:{dashboard_port}")
    try:
        yield dashboard
    finally:
        _stop()
        ray.shutdown()


def node_to_be(config: Mapping[str, Any]) -> Node:
    """Return the node that `ray_node` would start, with what Ray finds on this machine, such as GPUs.

    Raise Unavailable where Ray would start none, as with too little memory.
    """
    try:
        spec = ResourceAndLabelSpec(**_node_options(config)).resolve(is_head=True, node_ip_address=HOST)
        return Node(HOST, True, spec.to_resource_dict())
    except Exception as exc:  # Ray raises plain ones
        raise Unavailable(f"the Ray node would not start: {exc}") from exc


def serve(config: Mapping[str, Any], dashboard: RayDashboard, endpoints: Endpoints) -> None:
    """Deploy, and watch until a signal. Raise ConfigError where Serve gives the deployment up."""
    require_resources(config, _nodes_when_known(dashboard))
    _say_waiting(TAKING_IN)
    dashboard.deploy(config)
    said, is_ready = TAKING_IN, False
    while True:
        try:
            waiting = waits_for(dashboard.applications(), endpoints)
        except Unavailable as exc:  # replicas work without the dashboard
            waiting = str(exc)
        if not waiting and not is_ready:
            is_ready = True
            print(endpoints.how_to_ask(dashboard.url), flush=True)
        elif waiting and waiting != said:
            _say_waiting(waiting)
        said = waiting
        time.sleep(POLL_SECONDS)


def waits_for(applications: Sequence[Application], endpoints: Endpoints) -> str:
    """Return why no request can be served yet, empty if one can. Raise ConfigError where none ever will."""
    for application in applications:
        if application.status == "DEPLOY_FAILED":
            raise ConfigError(f"{application.name}: {application.problem}")
    unhealthy = [each for application in applications for each in application.deployments if not each.is_healthy]
    if unhealthy:
        return ", ".join(f"{each.name} ({each.message or each.status.lower()})" for each in unhealthy)
    if not applications or any(application.status != "RUNNING" for application in applications):
        return TAKING_IN
    return asyncio.run(_unused_workers(endpoints))


async def _unused_workers(endpoints: Endpoints) -> str:
    """Return what the orchestrator waits for."""
    async with endpoints.client() as client:
        try:
            problems = find_problems(await client.server_info())
        except Unauthenticated:  # it requires a key, so it is up
            return ""
        except BoughError as exc:
            return f"the orchestrator ({exc})"
    return "; ".join(problems)


def _nodes_when_known(dashboard: RayDashboard) -> tuple[Node, ...]:
    """Return the nodes once the dashboard, which starts after its node, knows them. Raise Unavailable when late."""
    most = START_SECONDS + TIMEOUT_SECONDS  # as the last of its calls may take its time
    _say_waiting(f"the Ray dashboard at {dashboard.url} to know its node, {most:g} s at most")
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


def _say_waiting(what: str) -> None:
    say(*quoted_lines(f"waiting: {what}"), file=sys.stderr)


def _stop() -> None:
    """Let every replica drain; a second Ctrl-C stops at once.

    Serve's controller is told, and not the dashboard, which a terminal's Ctrl-C ends as well.
    """
    print(f"ending everything; what runs may finish, {STOP_SECONDS:g} s at most", file=sys.stderr, flush=True)
    with suppress(Stopped, RayError):
        if client := _get_global_client(raise_if_no_controller_running=False):
            client.shutdown(STOP_SECONDS)


def _deployments(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [each for application in config["applications"] for each in application.get("deployments", ())]


def _node_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Ray is told of its node; the rest it finds out by itself."""
    asked = [(each.get("ray_actor_options") or {}).get("resources") or {} for each in _deployments(config)]
    return {
        "num_cpus": max(2, os.cpu_count() or 1),
        "resources": {name: float(NUM_RESOURCES) for each in asked for name in each},
        "object_store_memory": OBJECT_STORE_BYTES,
    }


def _uses_demonstration(config: Mapping[str, Any]) -> bool:
    programs = [(each.get("user_config") or {}).get("program", {}) for each in _deployments(config)]
    return any(program.get("model") == DEMONSTRATION for program in programs)


def catch_signals() -> None:
    """Make SIGTERM and Ctrl-C raise Stopped in the main thread."""

    def stop(*_: object) -> None:
        raise Stopped

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
