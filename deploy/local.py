"""bough under Ray Serve on one machine: starts a Ray node, deploys on it, and prints how to send requests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import ray
import ray.serve
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray.exceptions import RayError
from ray.serve.config import gRPCOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatusOverview, ServeDeploySchema

from bough.client import Client
from bough.config.addresses import require_free_ports
from bough.config.parsers import MAX_PORT, number
from bough.config.processes import OrchestratorConfig, ServiceConfig
from bough.errors import BoughError, ConfigError, Unauthenticated, Unavailable
from bough.health.problems import find_problems
from bough.health.ray_dashboard import Node
from bough.processes.demonstration import ensure_demonstration
from bough.processes.progress import QUESTION, activation, bough_command, curl_command
from bough.runtime.log_lines import quoted_lines, say
from bough.security.keys import WorkerKey
from bough.security.tls import files_towards
from bough.simulation.profile import load_profile
from deploy.check import HAPROXY, check, deployments_of, load, orchestrator_of, require_resources, uses_haproxy
from deploy.settings import DEMONSTRATION, INDEX, INDEX_PORT, PORTS, Role

HOST = "127.0.0.1"
PROGRAM = f"{Role.ORCHESTRATOR.value}.user_config.program"
POLL_SECONDS = 1.0
STOP_SECONDS = 60.0  # for all replicas to drain
DRAIN_SECONDS = 25.0  # of an orchestrator: a user who presses Ctrl-C does not want to wait for ten minutes
OBJECT_STORE_BYTES = 100 * 1000**2  # the least that Ray accepts: bough does not use it
OF_ALL = frozenset(f.name for f in fields(ServiceConfig))  # settings that a simulated worker has too
HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": "8404", "RAY_SERVE_HAPROXY_METRICS_PORT": "9101"}  # Ray's defaults
HAPROXY_SCRIPT = Path(__file__).with_name("haproxy.sh")
parse_any_port = number(int, -1, MAX_PORT)
NUM_RESOURCES = 8  # of each kind that a deployment requests: more than needed, as there is only one node
TAKING_IN = "Serve to accept the application"

OPENAI = """{ca}python -c '
import os
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key={api_key})
model = client.models.list().data[0].id
messages = [{{"role": "user", "content": "{question}"}}]
for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=64, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
'

"""
TEXT = (
    "{ready} three ways to ask, from another terminal{activation}:\n\n{curl}\n\n"
    + OPENAI
    + """{generate} "{question}"

{doctor} --ray {dashboard} shows nodes, replicas and workers. Ctrl-C ends everything."""
)


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. A KeyboardInterrupt, as asyncio logs and drops other exceptions of its callbacks."""


def run(file: Path, simulate: str, port: int | None, dashboard_port: int) -> None:
    """Serve until a signal, which raises Stopped. Raise BoughError for an error that the user must correct."""
    catch_signals()
    if simulate:
        load_profile(simulate)  # errors in it are reported before anything starts
    config = load(file)
    adapt(config, simulate, port)
    check(config)
    endpoints = Endpoints.of(config)
    if uses_haproxy():
        end_haproxy_with_ray()
    require_free_ports(HOST, ports_of(config, dashboard_port))
    require_resources(config, (node_to_be(config),))  # a node takes minutes to start on a busy machine
    if _uses_demonstration(config):
        ensure_demonstration()
    with ray_node(config, dashboard_port) as dashboard_url:
        deploy(config)
        watch(endpoints, dashboard_url)


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
    for _, deployment in deployments_of(config):
        if deployment["name"] == Role.ORCHESTRATOR.value:
            own = deployment.get("user_config", {})
            program = {"host": HOST, "drain_seconds": DRAIN_SECONDS, **own.get("program", {})}
            deployment["user_config"] = {**own, "program": program}
        if simulate and deployment["name"] in (Role.TARGET.value, Role.DRAFT.value):
            profile = str(Path(simulate).absolute()) if Path(simulate).is_file() else simulate
            program = {name: value for name, value in deployment["user_config"]["program"].items() if name in OF_ALL}
            program |= {"host": HOST, "simulate": profile}
            deployment["user_config"] = {**deployment["user_config"], "program": program}


def ports_of(config: Mapping[str, Any], dashboard_port: int) -> dict[str, int]:
    """Return all ports that must be free, by their settings. Raise ConfigError for an invalid port."""
    ports: dict[str, Any] = {"--dashboard-port": dashboard_port}
    if config.get("proxy_location") != "Disabled":
        ports["--port (or http_options.port)"] = http_port(config)
    for _, deployment in deployments_of(config):
        name, settings = deployment["name"], deployment.get("user_config", {})
        if name == INDEX:
            ports["Index.user_config.port"] = settings.get("port", INDEX_PORT)
        else:
            program = settings.get("program", {})
            ports |= {f"{name}.user_config.program.{key}": program.get(key, 0) for key in PORTS}
    if uses_haproxy():
        ports |= {name: os.environ.get(name, default) for name, default in HAPROXY_PORTS.items()}
    for where, given in ports.items():
        try:
            ports[where] = parse_any_port(str(given))
        except ValueError as exc:
            raise ConfigError(f"{where}: {exc}, got {given!r}") from exc
    return ports


def end_haproxy_with_ray() -> None:
    """Have Ray run HAProxy through a script that ends it together with Ray's process.

    Raise ConfigError if Ray finds no HAProxy: it would serve without any HTTP port, and only log that.
    """
    from ray.serve._private.haproxy import get_haproxy_binary  # imported here, as it loads jinja2

    try:
        binary = get_haproxy_binary()
    except FileNotFoundError as exc:
        raise ConfigError(f"--haproxy (or {HAPROXY}): must have an HAProxy to run: {exc}") from exc
    if binary != str(HAPROXY_SCRIPT):  # else it is inherited, and would run itself
        os.environ["BOUGH_HAPROXY"] = binary
    os.environ |= {"BOUGH_PYTHON": sys.executable, "RAY_SERVE_HAPROXY_BINARY_PATH": str(HAPROXY_SCRIPT)}


@contextmanager
def ray_node(config: Mapping[str, Any], dashboard_port: int) -> Iterator[str]:
    """Run a Ray cluster of one node with the resources that the configuration requests, until the block ends.

    Yields the URL of its dashboard.
    Raise Unavailable if a part does not start within Ray's own time limits, two of which `deploy.up` sets.
    """
    print("starting a Ray node; a busy machine may take minutes", file=sys.stderr, flush=True)
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
    except Exception as exc:  # Ray raises plain exceptions if a part of its node does not start in time
        ray.shutdown()
        raise Unavailable(f"the Ray node did not start: {exc}") from exc
    catch_signals()  # again, as Ray has replaced the handlers
    try:
        yield f"http://{HOST}:{dashboard_port}"
    finally:
        _stop()
        ray.shutdown()


def node_to_be(config: Mapping[str, Any]) -> Node:
    """Return the node that `ray_node` would start, with the resources that Ray finds on this machine, such as GPUs.

    Raise Unavailable if Ray would not start one, for example with too little memory.
    """
    try:
        spec = ResourceAndLabelSpec(**_node_options(config)).resolve(is_head=True, node_ip_address=HOST)
        return Node(HOST, True, spec.to_resource_dict())
    except Exception as exc:  # Ray raises plain ones
        raise Unavailable(f"the Ray node would not start: {exc}") from exc


def deploy(config: Mapping[str, Any]) -> None:
    """Start Serve and deploy, as `serve run` does. Raise Unavailable if Serve does not accept the configuration."""
    _say_waiting(TAKING_IN)
    schema = ServeDeploySchema.model_validate(config)
    try:
        ray.serve.start(
            proxy_location=schema.proxy_location,
            http_options=schema.http_options.model_dump(),
            grpc_options=gRPCOptions(**schema.grpc_options.model_dump()),
            logging_config=schema.logging_config,
        )
        _get_global_client().deploy_apps(schema)
    except Exception as exc:  # Ray raises plain ones, with the traceback of another process in their text
        last = (str(exc).strip().splitlines() or [repr(exc)])[-1]
        raise Unavailable(f"Serve does not accept the configuration: {last}") from exc


def watch(endpoints: Endpoints, dashboard_url: str) -> None:
    """Until a signal, print what is missing, then how to send requests. Raise ConfigError if Serve gives up."""
    said, is_ready = TAKING_IN, False
    while True:
        try:
            waiting = waits_for(ray.serve.status().applications, endpoints)
        except RayError as exc:  # replicas work without Serve's controller, which Ray starts again
            waiting = f"Serve's controller ({exc})"
        if not waiting and not is_ready:
            is_ready = True
            print(endpoints.how_to_ask(dashboard_url), flush=True)
        elif waiting and waiting != said:
            _say_waiting(waiting)
        said = waiting
        time.sleep(POLL_SECONDS)


def waits_for(applications: Mapping[str, ApplicationStatusOverview], endpoints: Endpoints) -> str:
    """Return why no request can be served yet, empty if one can. Raise ConfigError if none ever will."""
    waiting = list[str]()
    for name, application in applications.items():
        unhealthy = {key: each for key, each in application.deployments.items() if each.status != "HEALTHY"}
        if application.status == "DEPLOY_FAILED":
            problems = [f"{key}: {each.message}" for key, each in unhealthy.items() if each.message]
            raise ConfigError(f"{name}: {'; '.join(problems) or application.message}")
        waiting += [f"{key} ({each.message or each.status.lower()})" for key, each in unhealthy.items()]
    if waiting:
        return ", ".join(waiting)
    if not applications or any(application.status != "RUNNING" for application in applications.values()):
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


def _say_waiting(what: str) -> None:
    say(*quoted_lines(f"waiting: {what}"), file=sys.stderr)


def _stop() -> None:
    """Let every replica drain; a second Ctrl-C stops at once.

    The request goes to Serve's controller, not to the dashboard, which a terminal's Ctrl-C ends too.
    """
    print(f"stopping; running requests may finish, {STOP_SECONDS:g} s at most", file=sys.stderr, flush=True)
    with suppress(Stopped, RayError):
        if client := _get_global_client(raise_if_no_controller_running=False):
            client.shutdown(STOP_SECONDS)


def _node_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Ray's settings for its node; Ray detects the rest by itself."""
    asked = [(each.get("ray_actor_options") or {}).get("resources") or {} for _, each in deployments_of(config)]
    return {
        "num_cpus": max(2, os.cpu_count() or 1),
        "resources": {name: float(NUM_RESOURCES) for each in asked for name in each},
        "object_store_memory": OBJECT_STORE_BYTES,
    }


def _uses_demonstration(config: Mapping[str, Any]) -> bool:
    programs = [(each.get("user_config") or {}).get("program", {}) for _, each in deployments_of(config)]
    return any(program.get("model") == DEMONSTRATION for program in programs)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The orchestrator's addresses for clients."""

    orchestrator: OrchestratorConfig
    address: str  # for gRPC
    url: str  # for HTTP

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Endpoints:
        """Return the addresses. Raise ConfigError, naming the setting, for a port that is not fixed."""
        orchestrator = orchestrator_of(config, os.environ)
        name, port = "http_options.port", http_port(config)
        if config.get("proxy_location") == "Disabled":
            name, port = f"{PROGRAM}.http_port", orchestrator.http_port
        for where, value in ((f"{PROGRAM}.port", orchestrator.port), (name, port)):
            if value <= 0:
                raise ConfigError(f"{where}: must be fixed, for clients to find it, got {value}")
        scheme = "https" if orchestrator.tls_cert else "http"
        return cls(orchestrator, f"{HOST}:{orchestrator.port}", f"{scheme}://{HOST}:{port}")

    def client(self) -> Client:
        """Return a client. It sends the secret of all processes, if there is one, which lets it request the status."""
        key_file = self.orchestrator.worker_key_file
        key = WorkerKey(key_file).file.value[0] if key_file else None
        return Client(self.address, api_key=key, certificates=files_towards(self.orchestrator))

    def how_to_ask(self, dashboard_url: str) -> str:
        """Return three example calls; they read an application's key from BOUGH_API_KEY if one is required."""
        files = files_towards(self.orchestrator)
        text = TEXT if not files.cert else TEXT.replace(OPENAI, "")  # OpenAI's client needs code to show a certificate
        return text.format(
            curl=curl_command(self.url, self.orchestrator),
            generate=bough_command("generate", self.address, self.orchestrator),
            doctor=bough_command("doctor", self.address, self.orchestrator),
            url=self.url,
            dashboard=dashboard_url,
            activation=activation(),
            ready="ready; with your API key in BOUGH_API_KEY," if self.orchestrator.keys else "ready;",
            api_key='os.environ["BOUGH_API_KEY"]' if self.orchestrator.keys else '"none"',
            ca=f"SSL_CERT_FILE={files.authority} " if files.authority else "",
            question=QUESTION,
        )


def http_port(config: Mapping[str, Any]) -> int:
    """Return the port of Serve's proxy."""
    port: int = ServeDeploySchema.model_validate(config).http_options.port
    return port


def catch_signals() -> None:
    """Make SIGTERM and Ctrl-C raise Stopped in the main thread."""

    def stop(*_: object) -> None:
        raise Stopped

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
