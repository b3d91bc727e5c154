"""Reads a deployment's `user_config`: settings of the supervised program and of its supervision.

Unknown names are refused before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from enum import Enum
from typing import Any, TypeVar

from google.protobuf.descriptor import ServiceDescriptor

from bough.config.cache_paths import demonstration_folder
from bough.config.parsers import number, parse_port, parse_seconds
from bough.config.processes import DraftConfig, OrchestratorConfig, ServiceConfig, TargetConfig
from bough.config.reader import parse, setting
from bough.errors import ConfigError
from bough.registry.registry import Quota
from bough.rpc.services import DRAFT, GENERATION, STAGES, TARGET

INDEX_PORT = 7412  # not 6379, which Ray's own GCS listens on
STOP_SECONDS = 45.0  # for a replica to drain: the program's own 25 s, and its exit
ORCHESTRATOR_DRAIN_SECONDS = 600.0  # default: as long as OpenAI's clients wait, as other replicas serve meanwhile
PORTS = ("port", "http_port", "metrics_port")  # settings of programs
DEMONSTRATION = "demonstration"  # as a model: the one that `bough demo` writes
SUPERVISED = {  # settings of programs that others set
    **dict.fromkeys(("advertise", "advertise_port", "index_url", "stage_of"), "the supervisor"),
    "stages": "args.stages",
}

Config = TypeVar("Config")


class Role(Enum):
    """What a deployment runs; the value is the deployment's name."""

    TARGET = "Target"
    STAGE = "Stage"
    DRAFT = "Draft"
    ORCHESTRATOR = "Orchestrator"

    @property
    def module(self) -> str:
        """Name of the program, for `python -m`."""
        return {Role.DRAFT: "draft_worker", Role.ORCHESTRATOR: "orchestrator"}.get(self, "target_worker")

    @property
    def config(self) -> type[ServiceConfig]:
        """Class of the program's settings."""
        return {Role.DRAFT: DraftConfig, Role.ORCHESTRATOR: OrchestratorConfig}.get(self, TargetConfig)

    @property
    def service(self) -> ServiceDescriptor:
        """The program's gRPC service."""
        return {Role.TARGET: TARGET, Role.STAGE: STAGES, Role.DRAFT: DRAFT, Role.ORCHESTRATOR: GENERATION}[self]

    @property
    def settings(self) -> frozenset[str]:
        """Names of the program's settings that a `user_config` may give."""
        return frozenset(f.name for f in fields(self.config)) - SUPERVISED.keys()

    @property
    def stop_seconds(self) -> float:
        """Limit for a replica to drain, unless the configuration has another."""
        return ORCHESTRATOR_DRAIN_SECONDS + 20.0 if self is Role.ORCHESTRATOR else STOP_SECONDS


INDEX = "Index"
# After --drain-seconds, in which a replica's program aborts what still runs, and ends; within Serve's time limit.
REPLICA_ENDING_SECONDS = 5.0
INDEX_SETTINGS = ("host", "port", "memory", "worker_key_file", "tls_cert", "tls_key", "tls_ca", "insecure")
# For the quota of sessions and that of requests; strings that grow take half as much more.
LEAST_INDEX_MB = 3 * Quota().max_bytes // 2**20 + 1
DEPLOYMENTS = (INDEX, *(role.value for role in Role))


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How a replica supervises its program."""

    niceness: int = setting(0, "niceness of the program; Ray's own processes have 15 by default", number(int, -20, 19))
    start_seconds: float = setting(3600.0, "seconds in which the program must be ready to serve", parse_seconds)
    silent_seconds: float = setting(
        30.0, "seconds after which a program that does not answer is replaced", parse_seconds
    )
    stall_seconds: float = setting(
        600.0, "seconds without a finished sweep or draft step, with calls waiting, until it is replaced", parse_seconds
    )
    log_folder: str = setting("", "folder for the program's log; empty is the system's folder for temporary files")


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """A deployment's `user_config`, parsed."""

    role: Role
    flags: tuple[str, ...]  # the program's, without those that its supervisor adds
    config: ServiceConfig  # as parsed from these flags, and defaults of this deployment
    host: str  # to listen on; empty for the node's own address
    supervision: Supervision
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSettings(ServiceConfig):
    """The `user_config` of the index that Serve supervises: INDEX_SETTINGS, which mean what they do for a worker.

    The workers' secret is the index's password; with certificates it accepts TLS only.
    """

    host: str = setting("", "address to listen on; empty is the node's own")
    port: int = setting(INDEX_PORT, "port of the index; clients need it to be the same after a restart", parse_port)
    memory: int = setting(
        2048, "MB that the index may use; it must exceed what clients can store", number(int, LEAST_INDEX_MB)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """The `args` of the application."""

    index_url: str = setting("", "URL of an existing index, or $NAME for that variable on each node; empty deploys one")
    drafts: bool = setting(True, "no: deploy no draft workers")
    stages: int = setting(1, "machines that hold the target's layers together", number(int, 1))


def read_program(role: Role, user_config: Mapping[str, Any], where: str = "user_config") -> ProgramSettings:
    """Parse the settings of a program. Raise ConfigError naming a setting that is unknown or cannot be parsed."""
    rest = dict(as_mapping(where, user_config))
    program = as_mapping(f"{where}.program", rest.pop("program", {}))
    environment = as_mapping(f"{where}.environment", rest.pop("environment", {}))
    supervision = read_fields(Supervision, rest, where, others=("program", "environment"))
    flags: list[str] = []
    defaults = ["--drain-seconds", str(ORCHESTRATOR_DRAIN_SECONDS)] if role is Role.ORCHESTRATOR else []
    for name, value in program.items():
        if name in SUPERVISED:
            raise ConfigError(f"{where}.program.{name}: must be left to {SUPERVISED[name]}, got {value!r}")
        if name not in role.settings:
            raise _unknown(f"{where}.program.{name}", sorted(role.settings))
        flags += ["--" + name.replace("_", "-"), _text(f"{where}.program.{name}", value)]
    try:
        config = parse(role.config, role.module, [*defaults, *flags], {})
    except ConfigError as exc:
        raise ConfigError(f"{where}.program: {exc}") from exc
    pairs = tuple((name, _variable(f"{where}.environment.{name}", value)) for name, value in environment.items())
    return ProgramSettings(role, tuple(flags), config, str(program.get("host", "")), supervision, pairs)


def read_index(user_config: Mapping[str, Any], where: str = "user_config") -> IndexSettings:
    """Parse the settings of the index. Raise ConfigError naming a setting that is unknown or cannot be parsed."""
    for name in as_mapping(where, user_config):
        if name not in INDEX_SETTINGS:
            raise _unknown(f"{where}.{name}", INDEX_SETTINGS)
    return read_fields(IndexSettings, user_config, where)


def read_fields(cls: type[Config], values: Mapping[str, Any], where: str, others: Sequence[str] = ()) -> Config:
    """Parse a mapping into a settings class; `others` are further allowed names, which other code reads.

    Raise ConfigError naming a setting that is unknown or cannot be parsed.
    """
    known: dict[str, Field[Any]] = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]  # a dataclass
    given = {}
    for name, value in as_mapping(where, values).items():
        if name not in known:
            raise _unknown(f"{where}.{name}", sorted([*known, *others]))
        try:
            given[name] = known[name].metadata["parse"](_text(f"{where}.{name}", value))
        except ValueError as exc:
            raise ConfigError(f"{where}.{name}: {exc}, got {value!r}") from exc
    return cls(**given)


def resolved_url(index_url: str, environ: Mapping[str, str]) -> str:
    """Return the index's URL; $NAME means that environment variable, which keeps passwords out of files.

    Raise ConfigError if the variable is not set.
    """
    if not index_url.startswith("$"):
        return index_url
    if index_url[1:] not in environ:
        raise ConfigError(f"args.index_url: must name a variable that is set on every node, got {index_url}")
    return environ[index_url[1:]]


def as_mapping(where: str, value: Any) -> Mapping[str, Any]:
    """Return the value if it is a mapping. Raise ConfigError otherwise, for example for None (a key without value)."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be a mapping of names to values, got {value!r}")
    return value


def _text(where: str, value: Any) -> str:
    """Return a value as text for a flag. Raise ConfigError for a list or mapping without such a form."""
    if value is None or isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be a value, or left out, got {value!r}")
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    if where.endswith(".program.model") and value == DEMONSTRATION:
        return str(demonstration_folder())
    return str(value)


def _variable(where: str, value: Any) -> str:
    """Return an environment variable's value; BOUGH_ ones are refused, as the supervisor needs them too."""
    if where.rpartition(".")[2].startswith("BOUGH_"):
        raise ConfigError(f"{where}: must be under program, got {value!r}")
    return _text(where, value)


def _unknown(where: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(f"{where}: no such setting; must be one of {', '.join(known)}")
