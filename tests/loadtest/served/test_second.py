"""Where orchestrators have bent, and what figures of slowed ones say of whole cores."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from bough.errors import ConfigError
from loadtest.served.second import SLOWER, as_of_whole_cores, bent_at, slow


def step(streams: int, rounds_per_second: float, lag: float = 0.01) -> dict[str, Any]:
    return {"streams": streams, "rounds_per_second": rounds_per_second, "loop_lag_p99_seconds": lag}


def test_streams_bend_where_those_that_come_bring_under_half_of_their_rounds() -> None:
    assert bent_at([step(100, 90), step(200, 150), step(300, 210)]) is None
    assert bent_at([step(100, 90), step(200, 150), step(300, 190)]) == 300
    assert bent_at([step(100, 40), step(200, 150)]) == 100


def test_streams_bend_where_the_event_loop_is_late() -> None:
    assert bent_at([step(100, 100, lag=0.05), step(200, 200, lag=0.1), step(300, 300)]) == 200


def test_figures_are_told_as_of_whole_cores() -> None:
    slow = step(300, 40.0, lag=0.2) | {
        "orchestrators": 2,
        "tokens_per_second": 100.0,
        "orchestrator_ms_a_stream_and_second": 0.5,
        "processor_ms_a_round": {"orchestrator-2": 2.0},
    }
    told = as_of_whole_cores(slow)
    assert (told["rounds_per_second"], told["tokens_per_second"]) == (40.0 * SLOWER, 100.0 * SLOWER)
    assert told["loop_lag_p99_seconds"] == pytest.approx(0.2 / SLOWER)
    assert told["share_of_orchestrators_cores"] == pytest.approx(0.5 * SLOWER * 300 / 1000 / 2, abs=0.01)
    assert told["processor_ms_a_round"] == {"orchestrator-2": 2.0}


def test_who_may_not_limit_processors_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(process_id: int, share: float) -> None:
        raise PermissionError(13, "Permission denied", "/sys/fs/cgroup/cpu/bough-1")

    monkeypatch.setattr("loadtest.served.second.slowed", refused)
    with ExitStack() as quotas, pytest.raises(ConfigError, match=r"second: control groups must be there .*denied"):
        slow([1], quotas)
