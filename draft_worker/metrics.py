"""Prometheus metrics of a draft worker: trees, draft steps and sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from bough.telemetry.metrics import counter, gauge
from draft_worker.engine.engine import DraftEngine


class DraftCollector(Collector):
    """Exports the engine's counters at each scrape, under vLLM's names where it has one."""

    def __init__(self, model_name: str, engine: DraftEngine, num_unanswered: Callable[[], int]) -> None:
        """`num_unanswered` counts calls, growing ones included."""
        self._model, self._engine, self._num_unanswered = {"model_name": model_name}, engine, num_unanswered

    def collect(self) -> Iterator[Metric]:
        engine, pool = self._engine, self._engine.pool
        num_running = engine.num_growing
        num_waiting = max(0, self._num_unanswered() - num_running)
        usage = engine.kv_used_bytes / pool.num_bytes if pool.num_bytes else 0.0
        gauges = {
            "vllm:num_requests_running": ("Calls whose trees are growing", num_running),
            "vllm:num_requests_waiting": ("Calls that wait for room", num_waiting),
            "vllm:kv_cache_usage_perc": ("Share of KV memory of sessions whose trees are growing", usage),
            "bough_kv_bytes": ("Memory for keys and values", pool.num_bytes),
            "bough_draft_sessions": ("Sessions whose keys and values are kept", len(pool)),
        }
        counters = {
            "bough_draft_trees": ("Trees grown", engine.num_trees),
            "bough_draft_nodes": ("Nodes of these trees, roots included", engine.num_nodes),
            "bough_draft_warm_trees": ("Trees that draft-ahead had begun", engine.num_warm_trees),
            "bough_draft_steps": ("Passes over the draft model, those ahead included", engine.num_passes),
            "bough_draft_step_seconds": ("Time that passes for trees took", engine.step_seconds),
        }
        for name, (text, value) in gauges.items():
            yield gauge(name, text, self._model, value)
        for name, (text, value) in counters.items():
            yield counter(name, text, self._model, value)
