"""What is known of each worker's seconds: its own curve where it is one, medians of the rest."""

from __future__ import annotations

import logging
import math

import pytest

from bough.protocol.cost_curve import CostCurve
from orchestrator.sizing.round_times import MAX_WORKERS, NUM_RECENT, RecentMedian, RoundTimes, WorkerTimes

CURVE = CostCurve((1, 64), (1.0, 2.0))
DECREASING = CostCurve((1, 64), (1.0, 0.5))


def test_a_median_is_followed_after_four_and_moved_by_no_single_one() -> None:
    recent = RecentMedian(0.25)
    assert recent.median == 0.25
    for _ in range(NUM_RECENT):
        recent.add(1.0)
    recent.add(1000.0)
    assert recent.median == 1.0
    for _ in range(NUM_RECENT // 2):
        recent.add(3.0)
    assert recent.median == 3.0


def test_workers_that_were_used_longest_ago_are_forgotten() -> None:
    times = RoundTimes()._targets
    first = times("0")
    first.update("0", CURVE)
    for index in range(1, MAX_WORKERS):
        times(str(index)).update(str(index), CURVE)
    assert times("0") is first
    times("one more")
    assert times("0") is first
    assert times("1").curve is None
    assert times.cache_info().currsize == MAX_WORKERS


def test_a_curve_that_is_told_holds_until_the_next() -> None:
    times = WorkerTimes()
    times.update("w", CURVE)
    assert times.curve == CURVE
    times.update("w", None)
    assert times.curve == CURVE
    times.update("w", later := CURVE.scaled(2.0))
    assert times.curve == later


@pytest.mark.parametrize(
    "bad",
    [
        DECREASING,
        CostCurve((1,), (math.nan,)),
        CostCurve((1, 2), (1.0,)),
        CostCurve((0,), (1.0,)),
        CostCurve((1,), (1.0,), 0),
    ],
)
def test_one_that_is_none_is_warned_of_once_by_what_is_wrong(bad: CostCurve, caplog: pytest.LogCaptureFixture) -> None:
    times = WorkerTimes()
    times.update("w7", CURVE)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            times.update("w7", bad)
    assert times.curve == CURVE
    (record,) = caplog.records
    assert record.getMessage().startswith("w7: cost")
    times.update("w7", sound := CURVE.scaled(3.0))
    assert times.curve == sound


def test_a_draft_step_is_as_long_as_steps_have_been_to_what_the_curve_says() -> None:
    times = WorkerTimes()
    assert times.step_seconds == 0.0
    times.update("d", CURVE)
    assert times.step_seconds == 1.0
    for _ in range(NUM_RECENT):
        times.ratio.add(1.5)
    assert times.step_seconds == 1.5
