"""The orchestrator's /metrics: what rounds add up to, under the names that others look for."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest

from bough.errors import Exhausted
from bough.protocol.decision import Decision, Mode, RoundSeconds, RoundTimings
from bough.protocol.generation import Event, Finished, Speculation, SpeculationMetrics, Started, Tokens, Usage
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Timings, Verdict, VerifyResult
from bough.telemetry.metrics import MetricsServer
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst
from orchestrator.sizing.plans import Proposal, RoundOutcome, RoundPlan, Situation, WorkerFacts
from orchestrator.sizing.totals import MAX_POSITIONS, Histogram, MeasuredSizer, RoundTotals
from orchestrator.sizing.tree_sizer import TreeSizer
from orchestrator.telemetry.metrics import BOUNDS, PERIOD_SECONDS, Figures, LoopLag, OrchestratorCollector
from orchestrator.telemetry.request_watch import RequestTotals, RequestWatch, TroubleCount
from tests.fakes.waiting import until

LABELS = re.compile(r'{(engine="0",)?model_name="m"}')


def served(figures: Figures) -> dict[str, float]:
    """What a scrape reads, without the dates of creation."""
    server = MetricsServer()
    server.registry.register(OrchestratorCollector(lambda: figures))
    server.serve("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
    finally:
        server.close()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#") and "_created" not in line)
    return {LABELS.sub("", name): float(value) for name, value in values.items()}


def a_round(mode: Mode, *, sent: int, left_out: int = 0, tokens: int, expected: float = 0.0) -> Decision:
    parts = RoundSeconds(draft=0.25, sweep=0.75) if expected else RoundSeconds()
    return Decision(
        1, mode, num_sent=sent, num_left_out=left_out, tokens=tokens, expected_tokens=expected, expected=parts,
        seconds=RoundSeconds(draft=0.5, sweep=1.0),
    )  # fmt: skip


def test_rounds_are_reported_under_the_names_of_vllm_and_of_the_sizer() -> None:
    totals = RoundTotals()
    totals.add(a_round(Mode.DRAFT, sent=64, left_out=3, tokens=4, expected=3.5))
    totals.add(a_round(Mode.DRAFT, sent=5, tokens=2, expected=2.5))
    totals.add(a_round(Mode.LOOKUP, sent=1, tokens=1, expected=1.0))
    totals.add(a_round(Mode.FIXED, sent=9, tokens=3))  # nothing was expected of it
    totals.plan_seconds.add(0.0003)
    (lag := Histogram(BOUNDS)).add(0.3)
    values = served(Figures("m", 2, 5, 77, RequestTotals(), totals, lag, num_tasks=9, num_held=3))
    assert (values["bough_event_loop_tasks"], values["bough_requests_without_target"]) == (9, 3)
    assert values['bough_event_loop_lag_seconds_bucket{le="0.5",model_name="m"}'] == 1
    assert values['bough_event_loop_lag_seconds_bucket{le="0.2",model_name="m"}'] == 0
    of_vllm = {name.removeprefix("vllm:"): value for name, value in values.items() if name.startswith("vllm:")}
    of_vllm = {name: value for name, value in of_vllm.items() if value}
    assert of_vllm == {
        "num_requests_running": 2,
        "num_requests_waiting": 5,
        "generation_tokens_total": 77,
        "spec_decode_num_drafts_total": 3,
        "spec_decode_num_draft_tokens_total": 60 + 4 + 8,
        "spec_decode_num_accepted_tokens_total": 6,
        'spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"}': 3,
        'spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"}': 2,
        'spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"}': 1,
    }
    assert values["bough_sizer_expected_tokens_total"] == 7.0
    assert values["bough_sizer_tokens_total"] == 7
    assert values["bough_sizer_expected_seconds_total"] == 3.0
    assert values["bough_sizer_seconds_total"] == 4.5
    modes = {mode.value: values[f'bough_sizer_rounds_total{{mode="{mode.value}",model_name="m"}}'] for mode in Mode}
    assert modes == {"draft": 2, "lookup": 1, "probe": 0, "fixed": 1, "off": 0}
    nodes = {le: values[f'bough_sizer_tree_nodes_bucket{{le="{le}",model_name="m"}}'] for le in ("1.0", "8.0", "+Inf")}
    assert nodes == {"1.0": 1, "8.0": 2, "+Inf": 4}
    assert values["bough_sizer_tree_nodes_sum"] == 79
    assert values["bough_sizer_plan_seconds_count"] == 1
    assert values["bough_sizer_plan_seconds_sum"] == pytest.approx(0.0003)


def test_requests_are_reported_with_their_waits_and_results() -> None:
    totals, now = RequestTotals(), [100.0]
    watch = RequestWatch(totals, lambda: now[0])
    timings, speculation = RoundTimings(), SpeculationMetrics(2, 8, 2, 2.5, (0, 2), num_degraded_rounds=1)
    of_round = Tokens((1, 2), (True, False), ("a", "b"), (), 5, 3, timings)
    events: list[tuple[float, Event]] = [
        (1.0, Started("r", 30, 7, "m")),
        (2.0, replace(of_round, num_nodes=0)),  # what a resumed request's client had not seen: of no round of this one
        (4.0, of_round),
        (6.0, of_round),
        (6.5, Finished("stop", "", "", Usage(30, 6, 20), speculation, timings, ())),
    ]
    for seconds, event in events:
        now[0] = 100.0 + seconds
        watch.note(event)
    RequestWatch(totals).failed(Exhausted("full", retry_seconds=1.0))
    values = served(Figures("m", 0, 0, 0, totals, RoundTotals(), Histogram(BOUNDS)))
    sums = {name.removesuffix("_sum"): value for name, value in values.items() if name.endswith("_sum") and value}
    assert sums == {
        "vllm:request_queue_time_seconds": 1.0,
        "vllm:request_prefill_time_seconds": 3.0,
        "vllm:request_decode_time_seconds": 2.0,
        "vllm:time_to_first_token_seconds": 4.0,
        "vllm:e2e_request_latency_seconds": 6.5,
        "vllm:inter_token_latency_seconds": 2.0,
        "vllm:request_time_per_output_token_seconds": 1.0,
    }
    assert values["vllm:prompt_tokens_total"] == 30
    assert values["bough_cached_prompt_tokens_total"] == 20
    ends = {key: value for key, value in values.items() if key.startswith("vllm:request_success_total")}
    assert ends == {
        f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="m"}}': float(reason == "stop")
        for reason in ("stop", "length", "abort")
    }
    assert values['bough_request_failures_total{error="Exhausted",model_name="m"}'] == 1


def test_openmetrics_output_has_the_same_names() -> None:
    """prometheus_client would write them with an underscore in the colon's place, for real Prometheus servers alone."""
    server = MetricsServer()
    figures = Figures("m", 2, 5, 77, RequestTotals(), RoundTotals(), Histogram(BOUNDS))
    server.registry.register(OrchestratorCollector(lambda: figures))
    server.serve("127.0.0.1", 0)
    try:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/metrics",
            headers={"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3"},
        )
        with urllib.request.urlopen(asked, timeout=5) as reply:
            assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 77.0' in reply.read().decode()
    finally:
        server.close()


def test_an_orchestrator_without_requests_reports_zeros() -> None:
    values = served(Figures("m", 0, 0, 0, RequestTotals(), RoundTotals(), Histogram(BOUNDS)))
    assert values["vllm:spec_decode_num_drafts_total"] == 0
    assert set(values.values()) == {0.0}


def test_numbers_are_counted_at_the_smallest_bound_above_them() -> None:
    tally = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        tally.add(value)
    assert tally.counts == [2, 2, 1]
    assert tally.total == 7.5


def test_the_deepest_levels_are_counted_together() -> None:
    totals = RoundTotals()
    totals.add(a_round(Mode.DRAFT, sent=200, tokens=MAX_POSITIONS + 3))
    assert totals.accepted_by_position == [1] * (MAX_POSITIONS - 1) + [3]


SITUATION = Situation(
    ScopedId("s"), Speculation(), 0.0, WorkerFacts("t", "t", 32, None), WorkerFacts("d", "d", 32, None), 9
)


def outcome_of(num_nodes: int, tokens: Sequence[int]) -> RoundOutcome:
    result = VerifyResult(Verdict((1,), 9), 3, Timings(total_ns=10**9))
    return RoundOutcome(num_nodes, tokens, result, None, 0, 0, RoundTimings(total_ns=10**9, target_ns=10**9))


def test_a_measured_sizer_decides_like_the_sizer_and_adds_up() -> None:
    """And a round that was never planned is no round."""
    own, measured = (TreeSizer(BestFirst(8, 4, 3), 4) for _ in range(2))
    sizer = MeasuredSizer(measured)
    tree = Tree.root(5)
    plans: list[RoundPlan] = [one.plan(SITUATION) for one in (own, sizer)]
    assert plans[0] == plans[1]
    proposals: list[Proposal] = [one.propose(ScopedId("s"), tree, tree) for one in (own, sizer)]
    assert len(proposals[0].tree) == len(proposals[1].tree) == 1
    decision = sizer.observe(ScopedId("s"), outcome_of(1, [7]))
    assert decision is not None
    assert list(sizer.log.of(ScopedId("s"))) == [decision]
    assert decision.tokens == 1
    assert sizer.totals.rounds == {Mode.DRAFT: 1}
    assert sum(sizer.totals.plan_seconds.counts) == 1
    assert sizer.totals.plan_seconds.total > 0
    assert sizer.observe(ScopedId("s"), outcome_of(1, [7])) is None
    assert sizer.totals.rounds.total() == 1
    sizer.forget(ScopedId("s"))


async def test_a_blocked_event_loop_shows_as_lag() -> None:
    """All that blocks the loop delays every stream: a call that sleeps counts as all the late moments in it."""
    lag = LoopLag()
    async with lag.running():
        await asyncio.sleep(0)  # the measuring begins
        time.sleep(0.3)
        await until(lambda: sum(lag.tally.counts))
    assert lag.tally.total > 0.2
    assert sum(lag.tally.counts) >= 0.2 / PERIOD_SECONDS


def test_faults_of_a_request_are_counted_while_it_runs() -> None:
    """Otherwise they would be reported minutes later, and never for a request that failed or was abandoned."""
    totals = RequestTotals()
    session = Mock(num_failovers=0, num_degraded_rounds=0)
    troubles = TroubleCount(totals, session)
    for failovers, degraded in ((0, 1), (0, 1), (1, 4)):
        session.num_failovers, session.num_degraded_rounds = failovers, degraded
        troubles.count()
        assert (totals.num_failovers, totals.num_degraded_rounds) == (failovers, degraded)
    TroubleCount(totals, Mock(num_failovers=2, num_degraded_rounds=0)).count()
    assert (totals.num_failovers, totals.num_degraded_rounds) == (3, 4)


@pytest.mark.parametrize("error", [GeneratorExit(), asyncio.CancelledError()])
def test_an_abandoned_request_was_aborted_unless_it_had_ended(error: BaseException) -> None:
    totals = RequestTotals()
    left, ended = RequestWatch(totals), RequestWatch(totals)
    left.failed(error)
    ended.note(Finished("stop", "", "", Usage(1, 1, 0), SpeculationMetrics(0, 0, 0, 0.0, (), 0), RoundTimings(), ()))
    ended.failed(error)
    assert (totals.finished, totals.failed) == ({"abort": 1, "stop": 1}, {})
    RequestWatch(totals).failed(KeyError())
    assert totals.failed == {"KeyError": 1}, "unexpected ones are told too"
