"""The application, as a Serve configuration names it: `import_path: deploy.app:build`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from deploy.replicas import DraftReplica, IndexReplica, OrchestratorReplica, TargetReplica
from deploy.settings import INDEX, STOP_SECONDS, AppSettings, Role, read_fields

MANY = 100_000  # requests at one replica: how many run is decided by the orchestrator's own admission
OPTIONS: Mapping[str, Any] = {  # where a configuration says nothing else
    "ray_actor_options": {"num_cpus": 0},  # what a node is for is said by resources
    "max_ongoing_requests": MANY,
    "health_check_period_s": 2.0,  # after three that failed in a row a replica is replaced
    "health_check_timeout_s": 20.0,
    "graceful_shutdown_timeout_s": STOP_SECONDS,
    "max_surge_percent": 0,  # there is no spare GPU, nor a second port, for another one beside
}


def build(args: dict[str, Any]) -> serve.Application:
    """All deployments, bound to one another; how many of each and where is said by the configuration.

    Raises:
        ConfigError: naming an argument that is not known.
    """
    settings = read_fields(AppSettings, args, "args")
    index = settings.index_url or serve.deployment(name=INDEX, user_config={}, **OPTIONS)(IndexReplica).bind()
    workers = [serve.deployment(name=Role.TARGET.value, **OPTIONS)(TargetReplica).bind(index)]
    if settings.has_drafts:
        workers.append(serve.deployment(name=Role.DRAFT.value, **OPTIONS)(DraftReplica).bind(index))
    return serve.deployment(name=Role.ORCHESTRATOR.value, **OPTIONS)(OrchestratorReplica).bind(index, workers)
