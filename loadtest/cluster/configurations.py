"""The Serve configurations of the trial: the initial one, and the changed ones deployed while streams run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.check import check, load
from loadtest.cluster.ray_cluster import HTTP_PORT, OTHER_INDEX

CONFIG = Path(__file__).parent.parent.parent / "deploy" / "two-machines.yaml"
PROFILE = Path(__file__).parent.parent / "data" / "cluster-profile.json"
CALLS_PER_DRAFT = 0.7  # trees growing at once per draft: exceeded with MANY streams, not reached with FEW


def trial_config() -> dict[str, Any]:
    """deploy/two-machines.yaml with simulated workers, without keys, with autoscaled drafts and longer timeouts."""
    config = load(CONFIG)
    config["http_options"] = {"host": "0.0.0.0", "port": HTTP_PORT}
    for deployment in _deployments(config):
        name, program = deployment["name"], {"simulate": str(PROFILE), "insecure": True}
        deployment["ray_actor_options"].pop("num_gpus", None)
        if name == "Index":
            deployment["user_config"]["insecure"] = True
        elif name == "Target":
            deployment["user_config"] = {"program": {**program, "drain_seconds": 5}}
        elif name == "Draft":
            deployment["user_config"] = {"program": {**program, "drain_seconds": 5}}
            del deployment["num_replicas"]
            deployment["autoscaling_config"] = {
                "min_replicas": 1,
                "max_replicas": 2,
                "metrics_interval_s": 1,  # Serve's check of look_back_period_s reads this, not the environment variable
                "look_back_period_s": 4,
                "upscale_delay_s": 1,
                "downscale_delay_s": 4,
                "policy": {
                    "policy_function": "deploy.policies:PerReplica",
                    "policy_kwargs": {"metric": "calls", "most": CALLS_PER_DRAFT},
                },
            }
        elif name == "Orchestrator":
            deployment |= {
                "num_replicas": 2,
                "max_replicas_per_node": 1,
            }  # one on each of two hosts, at the same fixed port
            program = deployment["user_config"]["program"]
            program |= {"draft_timeout": 2, "failover_timeout": 300, "drain_seconds": 5, "insecure": True}
            del program["keys"]
    check(config)
    return config


def with_other_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with a changed setting for every program."""
    for deployment in _deployments(config):
        if "program" in deployment["user_config"]:
            deployment["user_config"]["program"]["drain_seconds"] = 4
    return config


def with_index_elsewhere(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the index on the host reserved for the move."""
    for deployment in _deployments(config):
        if deployment["name"] == "Index":
            deployment["ray_actor_options"]["resources"] = {OTHER_INDEX: 1}
    return config


def _deployments(config: dict[str, Any]) -> list[dict[str, Any]]:
    deployments: list[dict[str, Any]] = config["applications"][0]["deployments"]
    return deployments
