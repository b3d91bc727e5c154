"""Autoscaling policies. Serve imports them by path, and applies its own delays to their results."""

from __future__ import annotations

from typing import Any

from bough.errors import ConfigError


class PerReplica:
    """Asks for as many replicas as keep the average of a metric per replica at `most`.

    The metric of orchestrators is `requests`, running and waiting; that of draft workers `calls`, trees that grow or
    wait. A draft worker computes its trees together, so `most` may be several as long as its steps stay short.
    """

    def __init__(self, metric: str, most: float) -> None:
        """Scale by `metric`, aiming at `most` for each replica. Raise ConfigError unless `most` is above 0."""
        if not isinstance(most, int | float) or most <= 0:
            raise ConfigError(f"policy_kwargs.most: must be a number above 0, got {most!r}")
        if metric not in METRICS:
            raise ConfigError(f"policy_kwargs.metric: must be one of {', '.join(METRICS)}, got {metric!r}")
        self._metric, self._most = metric, most

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, which Serve rounds up; the current number while no metric is known.

        `context` is Ray's `AutoscalingContext`.
        """
        by_replica = (context.aggregated_metrics or {}).get(self._metric)  # averages
        if not by_replica:
            return context.target_num_replicas, {}
        return sum(by_replica.values()) / self._most, {}


REQUESTS = "requests"
CALLS = "calls"
METRICS = (REQUESTS, CALLS)
