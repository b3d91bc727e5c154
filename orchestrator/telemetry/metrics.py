"""Prometheus metrics of an orchestrator: requests, speculation under vLLM's names, and accuracy of predictions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from bough.concurrency.tasks import background
from bough.protocol.decision import Mode
from bough.telemetry.metrics import counter, gauge, labelled
from orchestrator.sizing.totals import Histogram, RoundTotals
from orchestrator.telemetry.request_watch import KEY_LIMIT, RequestTotals

ENDS = ("stop", "length", "abort")
FAILURES = ("Exhausted", "Unavailable", "InvalidRequest", "DeadlineExceeded", "Unauthenticated", KEY_LIMIT)


class Figures(NamedTuple):
    """Snapshot of everything exported."""

    model_name: str  # of the target used last; empty before the first
    num_running: int  # requests
    num_waiting: int  # requests
    num_tokens: int  # generated
    requests: RequestTotals
    totals: RoundTotals
    loop_lag: Histogram  # seconds, of the event loop
    num_tasks: int = 0  # of the event loop
    num_held: int = 0  # of the waiting requests, those that have a place and wait for a target


class OrchestratorCollector(Collector):
    """Exports totals at each scrape; rounds only add to them."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        name, num_running, num_waiting, num_tokens, requests, totals, loop_lag, num_tasks, num_held = self._figures()
        model = {"model_name": name}
        yield gauge("vllm:num_requests_running", "Requests being generated", model, num_running)
        yield gauge(
            "vllm:num_requests_waiting", "Requests waiting for a place, a KV slot or a target", model, num_waiting
        )
        text = "Of these, requests waiting for a target to come back"
        yield gauge("bough_requests_without_target", text, model, num_held)
        yield counter("vllm:generation_tokens", "Tokens generated", model, num_tokens)
        yield from _requests(name, requests)
        yield from _speculation(model, totals)
        yield from _predictions(model, totals)
        yield _by_mode(name, totals)
        yield _histogram("bough_sizer_tree_nodes", "Nodes of trees sent, roots included", name, totals.nodes)
        text = "Time that the sizer took in a round"
        yield _histogram("bough_sizer_plan_seconds", text, name, totals.plan_seconds)
        text = "Delay of due callbacks in the orchestrator's event loop"
        yield _histogram("bough_event_loop_lag_seconds", text, name, loop_lag)
        yield gauge("bough_event_loop_tasks", "Tasks of the orchestrator's event loop", model, num_tasks)


def _requests(name: str, totals: RequestTotals) -> Iterator[Metric]:
    model = {"model_name": name}
    yield counter("vllm:prompt_tokens", "Tokens of prompts", model, totals.prompt_tokens)
    yield counter("bough_cached_prompt_tokens", "Of these, tokens with cached KV", model, totals.cached_tokens)
    yield counter("bough_failovers", "Times that another target took over a request", model, totals.num_failovers)
    degraded = "Rounds without guesses of a draft worker because none answered"
    yield counter("bough_degraded_rounds", degraded, model, totals.num_degraded_rounds)
    text = "Finished requests by finish reason"
    yield _by_label("vllm:request_success", text, name, "finished_reason", totals.finished, ENDS)
    text = "Requests that were refused or ended with an error, by kind of error"
    yield _by_label("bough_request_failures", text, name, "error", totals.failed, FAILURES)
    times = {
        "vllm:request_queue_time_seconds": ("Time before a request began", totals.queue),
        "vllm:request_prefill_time_seconds": ("Time from a request's beginning to its first tokens", totals.prefill),
        "vllm:request_decode_time_seconds": ("Time from the first tokens to the last", totals.decode),
        "vllm:time_to_first_token_seconds": ("Time before the first tokens", totals.first_token),
        "vllm:e2e_request_latency_seconds": ("Time of a whole request", totals.whole),
        "vllm:inter_token_latency_seconds": ("Time between the rounds of a request", totals.between),
        "vllm:request_time_per_output_token_seconds": ("Time for a token after the first round", totals.per_token),
    }
    for metric, (text, tally) in times.items():
        yield _histogram(metric, text, name, tally)


def _by_label(
    name: str, text: str, model_name: str, label: str, counts: Mapping[str, int], known: Sequence[str]
) -> Metric:
    """A counter for each value of a label; `known` values exist from the start: rates then begin at 0."""
    common = labelled(name, {"model_name": model_name})
    metric = CounterMetricFamily(name, text, labels=[*common, label])
    for value in dict.fromkeys((*known, *tuple(counts))):
        metric.add_metric([*common.values(), value], counts.get(value, 0))
    return metric


def _speculation(model: dict[str, str], totals: RoundTotals) -> Iterator[Metric]:
    accepted = totals.accepted_by_position
    yield counter("vllm:spec_decode_num_drafts", "Rounds with guesses", model, totals.num_drafts)
    yield counter("vllm:spec_decode_num_draft_tokens", "Guesses verified", model, totals.num_draft_tokens)
    yield counter("vllm:spec_decode_num_accepted_tokens", "Of these, accepted", model, sum(accepted))
    text = "Guesses accepted by level below the root, from 0"
    by_position = {str(position): count for position, count in enumerate(accepted) if count}
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    yield _by_label(name, text, model["model_name"], "position", by_position, ())


def _predictions(model: dict[str, str], totals: RoundTotals) -> Iterator[Metric]:
    """Expected and realised sums; the ratio of their rates is the bias of predictions."""
    of_rounds = "of rounds with a prediction"
    yield counter("bough_sizer_expected_tokens", f"Tokens expected {of_rounds}", model, totals.expected_tokens)
    yield counter("bough_sizer_tokens", f"Tokens {of_rounds}", model, totals.tokens)
    yield counter("bough_sizer_expected_seconds", f"Time expected {of_rounds}", model, totals.expected_seconds)
    yield counter("bough_sizer_seconds", f"Time {of_rounds}", model, totals.seconds)


def _by_mode(model_name: str, totals: RoundTotals) -> Metric:
    counts = {mode.value: totals.rounds[mode] for mode in Mode}
    return _by_label("bough_sizer_rounds", "Rounds by how their trees were chosen", model_name, "mode", counts, ())


def _histogram(name: str, text: str, model_name: str, tally: Histogram) -> Metric:
    bounds = [*map(str, tally.bounds), "+Inf"]
    labels = labelled(name, {"model_name": model_name})
    metric = HistogramMetricFamily(name, text, labels=[*labels])
    metric.add_metric([*labels.values()], list(zip(bounds, accumulate(tally.counts), strict=True)), tally.total)
    return metric


PERIOD_SECONDS = 0.02
COUNT_SECONDS = 1.0  # between two counts of tasks
BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class LoopLag:
    """The event loop's lag, and its number of tasks.

    Code that blocks the loop delays every stream, and shows here as lag; tasks that never end show in the number. One
    tick is due every `PERIOD_SECONDS`, even while the loop is blocked: a pause of a second counts as the fifty delayed
    ticks, the last of which was hardly late. Percentiles are thus over time, not over measurements.
    """

    def __init__(self) -> None:
        self.tally = Histogram(BOUNDS)  # seconds
        self.num_tasks = 0  # of the event loop, as they were counted last

    def running(self) -> AbstractAsyncContextManager[None]:
        """Measures for as long as the block runs."""
        return background(self._measure())

    async def _measure(self) -> None:
        next_count = 0.0
        due = time.monotonic() + PERIOD_SECONDS
        while True:
            await asyncio.sleep(due - time.monotonic())
            now = time.monotonic()
            while due <= now:
                self.tally.add(now - due)
                due += PERIOD_SECONDS
            if now >= next_count:
                self.num_tasks, next_count = len(asyncio.all_tasks()), now + COUNT_SECONDS
