"""`python -m deploy.check FILE [--ray http://HEAD:8265]`: check a Serve configuration before it is deployed.

Serve's own schema ignores unknown keys; here they are errors, and so is a setting in `user_config` that its program
would refuse. --ray also checks that the cluster has the resources that the deployments request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation, RequestRouterConfig
from ray.serve.schema import ServeDeploySchema

from bough.config.addresses import is_loopback
from bough.config.flag_parser import FlagParser
from bough.config.json_fields import first_refusal
from bough.config.processes import OrchestratorConfig, TargetConfig, parse
from bough.errors import BoughError, ConfigError
from bough.health.ray_dashboard import Node, RayDashboard
from bough.processes.child import STOP_SECONDS as KILL_AFTER_SECONDS
from bough.runtime.log_lines import say_error
from deploy.policies import CALLS, REQUESTS, PerReplica
from deploy.settings import (
    DEPLOYMENTS,
    INDEX,
    PORTS,
    REPLICA_ENDING_SECONDS,
    AppSettings,
    ProgramSettings,
    Role,
    as_mapping,
    read_fields,
    read_index,
    read_program,
)

IMPORT_PATH = "deploy.app:build"
PER_REPLICA = "deploy.policies:PerReplica"
METRIC_OF: Mapping[Role, str] = {Role.DRAFT: CALLS, Role.ORCHESTRATOR: REQUESTS}  # that its replicas report to Serve
MOST_SHOWN = 80  # characters of a refused value
HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"  # Ray's variable, on every node
DICTS: Mapping[str, type[BaseModel]] = {  # fields of deployments that Serve takes as plain mappings, and checks later
    "autoscaling_config": AutoscalingConfig,
    "request_router_config": RequestRouterConfig,
}

Schema = TypeVar("Schema", bound=BaseModel)


def load(path: Path) -> dict[str, Any]:
    """Read a configuration from a file and check it. Raise ConfigError naming the file and the key that is refused."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path}: must be a readable file, got: {exc.strerror}") from exc
    except (ValueError, yaml.YAMLError) as exc:
        raise ConfigError(f"{path}: must be YAML, got: {' '.join(str(exc).split())}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must be a mapping, as `serve deploy` reads it, got {config!r}")
    try:
        check(config)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    return config


def check(config: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming the key, for what Serve or one of bough's programs would refuse."""
    for where, deployment in deployments_of(config):  # before Ray's own checks, which assume that each is a mapping
        as_mapping(where, deployment)
        for name, model in DICTS.items():
            if isinstance(given := deployment.get(name), Mapping):
                # Validation would import the policy.
                _validated(model, {key: given[key] for key in given if key != "policy"}, f"{where}.{name}.")
    schema = _validated(ServeDeploySchema, config, "")
    for application in config["applications"]:
        if application["import_path"] == IMPORT_PATH:
            _check_application(application)
            _check_proxy(schema, orchestrator_of({"applications": [application]}, {}))


def deployments_of(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the deployments of a configuration, which may be invalid, each with its path."""
    applications = config.get("applications")
    return [
        (f"applications[{number}].deployments[{index}]", deployment)
        for number, application in enumerate(applications if isinstance(applications, list) else ())
        if isinstance(application, Mapping)
        for index, deployment in enumerate(application.get("deployments") or ())
    ]


def _validated(model: type[Schema], value: Any, where: str) -> Schema:
    """Validate by a schema of Serve's, and refuse unknown keys. Raise ConfigError naming what is refused."""
    try:
        return model.model_validate(value, extra="forbid")
    except ValidationError as exc:
        refused = first_refusal(exc, lambda value: repr(value)[:MOST_SHOWN])
        raise ConfigError(str(refused.named(where + refused.field))) from exc


def require_resources(config: Mapping[str, Any], nodes: tuple[Node, ...]) -> None:
    """Raise ConfigError for a deployment that fits on no node; the message has its request and the nodes' resources."""
    alive = [node for node in nodes if node.is_alive]
    for _, deployment in deployments_of(config):
        wanted = wanted_resources(deployment)
        if any(all(node.resources.get(name, 0) >= amount for name, amount in wanted.items()) for node in alive):
            continue
        asked = ", ".join(f"{name} {amount:g}" for name, amount in sorted(wanted.items()))
        have = "; ".join(f"{node.host} has {node.describe_resources()}" for node in alive) or "there is no node"
        lacking = sorted(name for name in wanted if not any(node.resources.get(name, 0) for node in alive))
        missing = f" (no node has any {', '.join(lacking)})" if lacking else ""
        raise ConfigError(f"{deployment['name']}: requests {asked}; must be on one node{missing}: {have}")


def wanted_resources(deployment: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that one replica requests, by Ray's names. Raise ConfigError for invalid numbers."""
    given = deployment.get("ray_actor_options")
    options, num_cpus = given or {}, (given or {}).get("num_cpus")
    if num_cpus is None:  # Serve's own default is 1; without options, those of deploy.app apply
        num_cpus = 0 if given is None else 1
    wanted = {"CPU": num_cpus, "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
    try:
        return {name: float(amount) for name, amount in wanted.items() if amount}
    except (TypeError, ValueError) as exc:
        where = f"{deployment['name']}.ray_actor_options.resources"
        raise ConfigError(f"{where}: must be numbers by name, got {options['resources']!r}") from exc


def _check_application(application: Mapping[str, Any]) -> None:
    args = read_fields(AppSettings, application.get("args", {}), "args")
    known = [*DEPLOYMENTS]
    if args.index_url:
        known.remove(INDEX)
    if not args.drafts:
        known.remove(Role.DRAFT.value)
    if args.stages == 1:
        known.remove(Role.STAGE.value)
    given: dict[str, Mapping[str, Any]] = {}
    for deployment in application.get("deployments", ()):
        if deployment["name"] in given:
            raise ConfigError(f"deployments: must have {deployment['name']} once, got it twice")
        given[deployment["name"]] = deployment
    for name in given:
        if name not in known:
            raise ConfigError(f"deployments: must be of {', '.join(known)}, got {name}")
    for name in known:
        if name == INDEX:
            _check_index(given.get(INDEX, {}))
        elif "user_config" not in given.get(name, {}):
            raise ConfigError(f"deployments: {name} has no user_config; must be given, with its program's settings")
        else:
            if args.stages > 1 and Role(name) in (Role.TARGET, Role.STAGE):
                _check_member(args.stages, Role(name), given[name])
            _check_deployment(Role(name), given[name])


def _check_member(stages: int, role: Role, deployment: Mapping[str, Any]) -> None:
    """Require one head, at a port where stages find it again, and as many stages as it waits for."""
    number = 1 if role is Role.TARGET else stages - 1
    if (given := deployment.get("num_replicas") or number) != number:
        raise ConfigError(f"{role.value}.num_replicas: must be {number} with args.stages {stages}, got {given}")
    where = f"{role.value}.user_config"
    config = read_program(role, deployment["user_config"], where).config
    assert isinstance(config, TargetConfig), "members are target workers"
    if config.simulate:
        raise ConfigError(f"{where}.program.simulate: must be left out with args.stages, got {config.simulate}")
    if role is Role.TARGET and not config.port:
        raise ConfigError(
            f"{where}.program.port: must be fixed with args.stages, got 0: stages keep their layers when the head "
            "restarts at its address"
        )


def orchestrator_of(config: Mapping[str, Any], environ: Mapping[str, str]) -> OrchestratorConfig:
    """Return the orchestrator's settings in a configuration, on a node with these environment variables."""
    ours = [each for each in config["applications"] if each["import_path"] == IMPORT_PATH]
    if len(ours) != 1:
        raise ConfigError(f"applications: {len(ours)} have the import_path {IMPORT_PATH}; must be one")
    (given,) = (each for each in ours[0]["deployments"] if each["name"] == Role.ORCHESTRATOR.value)
    settings = read_program(Role.ORCHESTRATOR, given["user_config"])
    return parse(OrchestratorConfig, Role.ORCHESTRATOR.module, settings.flags, environ)


def _check_proxy(schema: ServeDeploySchema, orchestrator: OrchestratorConfig) -> None:
    """Require that Serve's proxy has at least the guards of the orchestrator's own HTTP port."""
    if schema.proxy_location is ProxyLocation.Disabled:
        return
    program, options = f"{Role.ORCHESTRATOR.value}.user_config.program", schema.http_options
    if uses_haproxy() and (options.ssl_certfile or orchestrator.tls_cert):
        raise ConfigError(
            f"{HAPROXY}: must be 0 with http_options.ssl_certfile or {program}.tls_cert, got 1: Ray has no TLS there"
        )
    if orchestrator.tls_client_ca:
        raise ConfigError(
            f"proxy_location: must be Disabled with {program}.tls_client_ca, got {schema.proxy_location.value}: "
            "Serve's proxy does not ask clients for certificates, so nothing through it is forwarded"
        )
    if is_loopback(options.host):
        return
    if not orchestrator.keys and not orchestrator.insecure:
        raise ConfigError(
            f"http_options.host: must be this machine's own, such as 127.0.0.1, without {program}.keys, got "
            f"{options.host}; {program}.insecure admits everyone who reaches it"
        )
    if orchestrator.tls_cert and not options.ssl_certfile:
        raise ConfigError(
            f"http_options.ssl_certfile: missing; must be given, and ssl_keyfile, with {program}.tls_cert: otherwise "
            "keys and texts cross the network to Serve's proxy unencrypted"
        )


def uses_haproxy() -> bool:
    """Whether Ray Serve runs HAProxy here in place of its own HTTP proxy."""
    return os.environ.get(HAPROXY) == "1"


def _check_deployment(role: Role, deployment: Mapping[str, Any]) -> None:
    wanted_resources(deployment)
    settings = read_program(role, deployment["user_config"], f"{role.value}.user_config")
    stop_seconds = float(deployment.get("graceful_shutdown_timeout_s", role.stop_seconds))
    least = settings.config.drain_seconds + REPLICA_ENDING_SECONDS + KILL_AFTER_SECONDS
    if stop_seconds < least:
        raise ConfigError(
            f"{role.value}.graceful_shutdown_timeout_s: must be at least {least:g}, got {stop_seconds:g}: the program "
            f"has {settings.config.drain_seconds:g} s to drain"
        )
    scaling = deployment.get("autoscaling_config")
    is_scaled = scaling or deployment.get("num_replicas") == "auto"
    if role in (Role.TARGET, Role.STAGE) and is_scaled:
        raise ConfigError(
            f"{role.value}.num_replicas: must be a number, without autoscaling_config: a target takes minutes to start"
        )
    if is_scaled:
        _check_policy(role, (scaling or {}).get("policy", {}))
    _require_room_for_ports(settings, deployment)


def _check_index(deployment: Mapping[str, Any]) -> None:
    read_index(deployment.get("user_config", {}), f"{INDEX}.user_config")
    number = "several" if deployment.get("autoscaling_config") else deployment.get("num_replicas") or 1
    if number != 1:
        raise ConfigError(f"{INDEX}.num_replicas: must be 1, got {number}: each replica would be a separate index")


def _check_policy(role: Role, value: Any) -> None:
    where = f"{role.value}.autoscaling_config.policy"
    policy = as_mapping(where, value)
    if unknown := sorted({*policy} - {*AutoscalingPolicy.model_fields}):
        raise ConfigError(f"{where}.{unknown[0]}: no such field; must be left out")
    if policy.get("policy_function") == PER_REPLICA:
        where = f"{where}.policy_kwargs"
        kwargs = as_mapping(where, policy.get("policy_kwargs", {}))
        if {*kwargs} != {"metric", "most"}:
            raise ConfigError(f"{where}: must be metric and most, got {dict(kwargs)}")
        PerReplica(kwargs["metric"], kwargs["most"])
        if kwargs["metric"] != METRIC_OF[role]:
            must = f"{METRIC_OF[role]}, as {role.value} reports no other"
            raise ConfigError(f"{where}.metric: must be {must}, got {kwargs['metric']}")
    elif role is Role.DRAFT and "policy_function" not in policy:
        raise ConfigError(
            f"{where}.policy_function: missing; must be given, such as {PER_REPLICA}: Serve's own counts "
            "requests through its proxy, which trees do not use"
        )


def _require_room_for_ports(settings: ProgramSettings, deployment: Mapping[str, Any]) -> None:
    """Raise ConfigError if two replicas with the same fixed port could be placed on one node."""
    several = deployment.get("num_replicas", 1) != 1 or deployment.get("autoscaling_config")
    if not several or deployment.get("max_replicas_per_node") == 1:
        return
    for name in PORTS:
        port = getattr(settings.config, name, 0)  # a draft worker has no http_port
        if port > 0:
            raise ConfigError(
                f"{settings.role.value}.max_replicas_per_node: must be 1 if there may be several replicas "
                f"and program.{name} is fixed, {port}"
            )


def main() -> int:
    """Check the file; exit with status 2 and a one-line message if it is wrong."""
    parser = FlagParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a configuration for `serve deploy`")
    parser.add_argument("--ray", metavar="URL", help="dashboard of a cluster that must have the resources")
    arguments = parser.parse_args()
    try:
        config = load(arguments.file)
        if arguments.ray:
            require_resources(config, RayDashboard(arguments.ray).nodes())
    except BoughError as exc:
        say_error(exc)
        return 2
    print(f"{arguments.file}: all is well")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
