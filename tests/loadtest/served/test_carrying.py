"""What is read of an orchestrator's figures, and of its processor time, while it carries streams."""

from __future__ import annotations

import os
import time
from typing import cast

import pytest

from loadtest.common.processor_use import processor_use
from loadtest.served import carrying
from loadtest.served.carrying import Reading
from loadtest.served.stack import Stack

BEFORE = """
bough_event_loop_lag_seconds_bucket{le="0.05",model_name="m"} 10.0
bough_event_loop_lag_seconds_bucket{le="0.1",model_name="m"} 90.0
bough_event_loop_lag_seconds_bucket{le="+Inf",model_name="m"} 100.0
"""
AFTER = """
# HELP bough_sizer_rounds_total Rounds by why their trees were
bough_sizer_rounds_total{mode="draft",model_name="m"} 7.0
bough_sizer_rounds_total{mode="off",model_name="m"} 2.0
vllm:generation_tokens_total{model_name="m"} 1.2e+03
bough_event_loop_lag_seconds_bucket{le="0.05",model_name="m"} 1000.0
bough_event_loop_lag_seconds_bucket{le="0.1",model_name="m"} 1089.0
bough_event_loop_lag_seconds_bucket{le="+Inf",model_name="m"} 1100.0
"""


def test_only_lags_between_two_readings_count() -> None:
    """What was late while streams began is not held against the steady state."""
    after = Reading.of(AFTER)
    assert (after.num_rounds, after.num_tokens) == (9.0, 1200.0)
    assert after.lag_p99(Reading.of(BEFORE)) == 0.05
    assert after.lag_p99(Reading.of("")) == 0.1


class Standing:
    """A stack of one orchestrator, which is this process."""

    def addresses(self, kind: str) -> list[str]:
        return ["127.0.0.1:1"]

    def process_ids(self) -> dict[str, int]:
        return {"orchestrator-0": os.getpid()}


async def test_an_event_loop_that_stands_is_not_told_as_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are served by another thread. A round was counted, and its lag was the least that is told apart."""

    async def url(address: str) -> str:
        return address

    async def unchanged(urls: list[str]) -> list[Reading]:
        return [Reading.of(AFTER)]

    monkeypatch.setattr(carrying, "_metrics_url", url)
    monkeypatch.setattr(carrying, "_read", unchanged)
    figures = await carrying.measured(cast(Stack, Standing()), 3, 0.01)
    assert figures["rounds_per_second"] == 0.0
    assert figures["loop_lag_p99_seconds"] >= 0.01


def test_processor_time_is_what_was_computed() -> None:
    """Of whichever threads there are; a core that another process has taken shows as time waited."""
    before = processor_use(os.getpid())
    deadline = time.thread_time() + 0.1
    while time.thread_time() < deadline:
        pass
    used = processor_use(os.getpid()) - before
    assert used.ran >= 0.05
    assert used.waited >= 0.0
