"""What a draft worker tells Prometheus: trees, draft steps and sessions, at http://HOST:PORT/metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from bough.telemetry.metrics import counter, gauge


class Figures(NamedTuple):
    """What a draft worker has done, and is busy with, at a moment."""

    num_running: int  # calls whose trees grow
    num_waiting: int  # other calls without a tree
    num_sessions: int  # whose KV is kept
    kv_bytes: int  # that KV may take
    kv_used_bytes: int  # of sessions whose trees grow
    num_trees: int
    num_nodes: int  # of these trees, roots included
    num_warm_trees: int  # trees of which something was known before they were asked for
    num_steps: int
    step_seconds: float  # that these steps took together


class DraftCollector(Collector):
    """Reads the sums that the engine keeps whenever somebody asks, under vLLM's names where it has one."""

    def __init__(self, model_name: str, figures: Callable[[], Figures]) -> None:
        self._model, self._figures = {"model_name": model_name}, figures

    def collect(self) -> Iterator[Metric]:
        """All of them, as they are now."""
        now = self._figures()
        usage = now.kv_used_bytes / now.kv_bytes if now.kv_bytes else 0.0
        gauges = {
            "vllm:num_requests_running": ("Calls whose trees are growing", now.num_running),
            "vllm:num_requests_waiting": ("Calls that wait for room", now.num_waiting),
            "vllm:kv_cache_usage_perc": ("Share of KV memory of sessions whose trees are growing", usage),
            "bough_kv_bytes": ("Memory for keys and values", now.kv_bytes),
            "bough_draft_sessions": ("Sessions whose keys and values are kept", now.num_sessions),
        }
        counters = {
            "bough_draft_trees": ("Trees grown", now.num_trees),
            "bough_draft_nodes": ("Nodes of these trees, roots included", now.num_nodes),
            "bough_draft_warm_trees": ("Trees that draft-ahead had begun", now.num_warm_trees),
            "bough_draft_steps": ("Passes over the draft model, those ahead included", now.num_steps),
            "bough_draft_step_seconds": ("Time that passes for trees took", now.step_seconds),
        }
        for name, (text, value) in gauges.items():
            yield gauge(name, text, self._model, value)
        for name, (text, value) in counters.items():
            yield counter(name, text, self._model, value)
