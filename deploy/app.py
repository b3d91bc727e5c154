"""The application that a Serve configuration names: `import_path: deploy.app:build`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from deploy.replicas import DraftReplica, IndexReplica, OrchestratorReplica, TargetReplica
from deploy.settings import INDEX, STOP_SECONDS, AppSettings, Role, read_fields

MANY = 100_000  # requests at one replica; the orchestrator's admission limits how many run
OPTIONS: Mapping[str, Any] = {  # unless the configuration says otherwise
    "ray_actor_options": {"num_cpus": 0},  # resources choose the node
    "user_config": {},  # one without any would have nothing to start, and be healthy
    "max_ongoing_requests": MANY,
    "health_check_period_s": 2.0,  # three failures in a row replace a replica
    "health_check_timeout_s": 20.0,
    "graceful_shutdown_timeout_s": STOP_SECONDS,
    "max_surge_percent": 0,  # no GPU or port is spare for a second replica
}


def build(args: dict[str, Any]) -> serve.Application:
    """Bind all deployments to one another; the configuration says how many replicas each has, and where.

    Raise ConfigError naming an argument that is unknown.
    """
    settings = read_fields(AppSettings, args, "args")
    index = settings.index_url or serve.deployment(name=INDEX, **OPTIONS)(IndexReplica).bind()
    workers = [serve.deployment(name=Role.TARGET.value, **OPTIONS)(TargetReplica).bind(index)]
    if settings.drafts:
        workers.append(serve.deployment(name=Role.DRAFT.value, **OPTIONS)(DraftReplica).bind(index))
    options = {**OPTIONS, "graceful_shutdown_timeout_s": Role.ORCHESTRATOR.stop_seconds}
    return serve.deployment(name=Role.ORCHESTRATOR.value, **options)(OrchestratorReplica).bind(index, workers)
