"""What counts as goodput, where its peak is, and what is reported of refusals."""

from __future__ import annotations

import asyncio
import json

import pytest

from loadtest.locust.samples import Sample
from loadtest.served import overload
from loadtest.served.overload import CLIMB, FILL_SECONDS, Offered, climb, offer, overload_figures
from loadtest.served.streams import Api, Ask


def offered(num_good: int, *others: Sample, num_seconds: float = 20.0) -> Offered:
    """Requests sent from second 100 on, of which this many ended in time, one after the other."""
    good = [
        Sample("grpc", 103.0 + 0.1 * number, 4.0, first_token_seconds=1.0, token_seconds=0.1, num_tokens=30)
        for number in range(num_good)
    ]
    return Offered([*good, *others], 100.0, num_seconds, [0.001] * (num_good + len(others)))


def refusal(api: str, seconds: float, delay: float) -> Sample:
    return Sample(api, 110.0, seconds, error="full", is_refused=True, retry_seconds=delay)


def test_goodput_counts_requests_that_met_the_objective_and_ended_under_load() -> None:
    """It counted all that finished, however late, and included the time of the last ones."""
    too_late = Sample("http", 105.0, 9.0, first_token_seconds=5.0, token_seconds=0.1, num_tokens=30)
    too_slow = Sample("http", 105.0, 9.0, first_token_seconds=1.0, token_seconds=0.3, num_tokens=30)
    while_filling = Sample("grpc", 100.0, 4.0, first_token_seconds=1.0, token_seconds=0.1, num_tokens=30)
    afterwards = Sample("grpc", 117.0, 4.0, first_token_seconds=1.0, token_seconds=0.1, num_tokens=30)
    broken = Sample("grpc", 105.0, 4.0, first_token_seconds=1.0, num_tokens=30, error="broken")
    step = offered(10, too_late, too_slow, while_filling, afterwards, broken, refusal("http", 0.01, 1.0))
    assert step.goodput == pytest.approx(10 * 30 / (20 - FILL_SECONDS))
    assert step.good_requests_per_second == pytest.approx(10 / (20 - FILL_SECONDS))
    figures = step.figures()
    assert (figures["finished"], figures["beyond_objective"], figures["refused"], figures["failed"]) == (14, 2, 1, 1)
    assert figures["offered_requests_per_second"] == 0.8


async def test_rates_climb_past_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = list[float]()

    async def served(apis: object, rate: float, seconds: float, seed: int) -> Offered:
        rates.append(rate)
        return offered([3, 5, 8, 7, 6][len(rates) - 1])

    monkeypatch.setattr(overload, "offer", served)
    steps = await climb([], 2.0, 20.0, seed=1)
    assert [len(step.samples) for step in steps] == [3, 5, 8, 7, 6]
    assert rates == pytest.approx([2.0 * CLIMB**step for step in range(5)])


async def test_a_climb_ends_if_no_rate_meets_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(apis: object, rate: float, seconds: float, seed: int) -> Offered:
        return offered(0, refusal("grpc", 0.01, 1.0))

    monkeypatch.setattr(overload, "offer", broken)
    steps = await climb([], 2.0, 20.0, seed=1)
    assert len(steps) == overload.MOST_STEPS
    figures = overload_figures(steps, steps[0], steps[0])
    assert (figures["goodput_ratio"], figures["times_the_peaks_requests"]) == (None, None)


async def test_requests_are_sent_on_schedule_over_both_apis_in_turn() -> None:
    """However slowly they are answered: those under way at the end are waited for, and counted."""
    asked = dict[str, int]()

    def api(name: str) -> Api:
        async def ask(one: Ask) -> Sample:
            asked[name] = asked.get(name, 0) + 1
            await asyncio.sleep(0.5)
            return Sample(name, 0.0, 0.5)

        return ask

    step = await offer([api("grpc"), api("http")], 200.0, 0.5, seed=1)
    assert 60 <= len(step.samples) == sum(asked.values()) <= 140
    assert abs(asked["grpc"] - asked["http"]) <= 1
    assert len(step.lateness) == len(step.samples)
    assert min(step.lateness) >= 0


def test_the_peak_is_the_best_rate_of_the_climb_and_after_the_overload() -> None:
    beyond = offered(
        40, refusal("grpc", 0.002, 1.0), refusal("http", 0.09, 2.0), refusal("http", 0.01, 0.0), num_seconds=20.0
    )
    figures = overload_figures([offered(20), offered(40), offered(30)], offered(50), beyond)
    assert figures["goodput_ratio"] == 0.8
    assert figures["times_the_peaks_requests"] == pytest.approx(43 / 20 / (40 / 15), abs=0.01)
    assert (figures["refused"], figures["refused_without_delay"], figures["refusal_max_seconds"]) == (3, 1, 0.09)
    assert figures["refusals_by_api"]["grpc"]["max_seconds"] == 0.002
    assert figures["refusals_by_api"]["http"]["delay_seconds"] == {"least": 0.0, "median": 1.0, "most": 2.0}
    json.dumps(figures)
