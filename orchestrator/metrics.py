"""What an orchestrator tells Prometheus: requests, speculation by vLLM's names, how well rounds were foreseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from bough.metrics import counter, gauge
from bough.sizing.decision import Mode
from orchestrator.sizing.totals import RoundTotals, Tally


class Figures(NamedTuple):
    """Everything that is told, as it is at a moment."""

    model_name: str  # of the target; empty while there has been none
    num_running: int  # requests
    num_waiting: int  # requests
    num_tokens: int  # generated
    totals: RoundTotals
    loop_lag: Tally  # seconds, of the event loop


class OrchestratorCollector(Collector):
    """Reads the sums that rounds have left whenever somebody asks: rounds themselves do nothing for it but add."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """All of them, as they are now."""
        name, num_running, num_waiting, num_tokens, totals, loop_lag = self._figures()
        model = {"model_name": name}
        yield gauge("vllm:num_requests_running", "Requests being generated", model, num_running)
        yield gauge("vllm:num_requests_waiting", "Requests waiting for a place, or for a KV slot", model, num_waiting)
        yield counter("vllm:generation_tokens", "Tokens generated", model, num_tokens)
        yield from _speculation(model, totals)
        yield from _predictions(model, totals)
        yield _by_mode(name, totals)
        yield _histogram("bough_sizer_tree_nodes", "Nodes of trees sent, roots included", name, totals.nodes)
        text = "Time in which the sizer decided and learnt, of a round"
        yield _histogram("bough_sizer_plan_seconds", text, name, totals.plan_seconds)
        text = "How late the orchestrator's event loop came to what was due"
        yield _histogram("bough_event_loop_lag_seconds", text, name, loop_lag)


def _speculation(model: dict[str, str], totals: RoundTotals) -> Iterator[Metric]:
    accepted = totals.accepted_by_position
    yield counter("vllm:spec_decode_num_drafts", "Rounds with guesses", model, totals.num_drafts)
    yield counter("vllm:spec_decode_num_draft_tokens", "Guesses verified", model, totals.num_draft_tokens)
    yield counter("vllm:spec_decode_num_accepted_tokens", "Of these, accepted", model, sum(accepted))
    text = "Guesses accepted by level below the root, from 0"
    by_position = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", text, labels=["model_name", "position"]
    )
    for position, count in enumerate(accepted):
        if count:
            by_position.add_metric([model["model_name"], str(position)], count)
    yield by_position


def _predictions(model: dict[str, str], totals: RoundTotals) -> Iterator[Metric]:
    """Ratios of their rates are the bias of predictions."""
    of_rounds = "of rounds with a prediction"
    yield counter("bough_sizer_expected_tokens", f"Tokens expected {of_rounds}", model, totals.expected_tokens)
    yield counter("bough_sizer_tokens", f"Tokens {of_rounds}", model, totals.tokens)
    yield counter("bough_sizer_expected_seconds", f"Time expected {of_rounds}", model, totals.expected_seconds)
    yield counter("bough_sizer_seconds", f"Time {of_rounds}", model, totals.seconds)


def _by_mode(model_name: str, totals: RoundTotals) -> Metric:
    metric = CounterMetricFamily("bough_sizer_rounds", "Rounds by why their trees were", labels=["model_name", "mode"])
    for mode in Mode:
        metric.add_metric([model_name, mode.value], totals.rounds[mode])
    return metric


def _histogram(name: str, text: str, model_name: str, tally: Tally) -> Metric:
    bounds = [*map(str, tally.bounds), "+Inf"]
    metric = HistogramMetricFamily(name, text, labels=["model_name"])
    metric.add_metric([model_name], list(zip(bounds, accumulate(tally.counts), strict=True)), tally.total)
    return metric
