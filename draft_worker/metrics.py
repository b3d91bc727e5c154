"""Prometheus metrics of a draft worker: trees, draft steps and sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from bough.telemetry.metrics import counter, gauge


class Figures(NamedTuple):
    """State and counters of a draft worker at a moment."""

    num_running: int  # calls whose trees grow
    num_waiting: int  # other unanswered calls
    num_sessions: int  # with a slot
    kv_bytes: int  # the budget
    kv_used_bytes: int  # of sessions whose trees grow
    num_trees: int
    num_nodes: int  # of these trees, roots included
    num_warm_trees: int  # trees of which some nodes were known from draft-ahead
    num_steps: int
    step_seconds: float  # total of these steps


class DraftCollector(Collector):
    """Exports the engine's counters at each scrape, under vLLM's names where it has one."""

    def __init__(self, model_name: str, figures: Callable[[], Figures]) -> None:
        self._model, self._figures = {"model_name": model_name}, figures

    def collect(self) -> Iterator[Metric]:
        """Collect the current values."""
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
