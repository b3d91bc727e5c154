"""How many replicas there should be: policies that Serve asks by their import path, and applies its own delays to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from bough.errors import ConfigError


class AutoscalingContext(Protocol):
    """What Serve tells a policy of a deployment (`ray.serve.config.AutoscalingContext`)."""

    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None  # by metric and replica, averages of a while
    target_num_replicas: int


class PerReplica:
    """As many replicas as keep the sum of a metric at `most` for each, on average.

    Orchestrators: `requests`, those that run and wait at one. Drafts: `calls`, trees that grow or wait to at one at a
    moment; a draft worker computes them together, so several are no harm until steps become long.
    """

    def __init__(self, metric: str, most: float) -> None:
        """`most` is above 0. Raises ConfigError."""
        if not isinstance(most, int | float) or most <= 0:
            raise ConfigError(f"policy_kwargs.most: value was {most!r}; must be a number above 0")
        if metric not in METRICS:
            raise ConfigError(f"policy_kwargs.metric: value was {metric!r}; must be one of {', '.join(METRICS)}")
        self._metric, self._most = metric, most

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Replicas, a fraction perhaps, which Serve rounds up; as many as before where nothing is known."""
        by_replica = (context.aggregated_metrics or {}).get(self._metric)
        if not by_replica:
            return context.target_num_replicas, {}
        return sum(by_replica.values()) / self._most, {}


REQUESTS = "requests"
CALLS = "calls"
METRICS = (REQUESTS, CALLS)
