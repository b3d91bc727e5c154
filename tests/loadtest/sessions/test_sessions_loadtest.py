"""`loadtest.sessions` on workers without weights, and `loadtest.capacity` on the rounds that it has written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.capacity import __main__ as capacity
from loadtest.sessions import __main__ as sessions
from loadtest.sessions import tenants
from loadtest.sessions.rounds_file import read_runs
from tests.fakes.simulated import write_profile

pytestmark = pytest.mark.long

SCALE, LINK = 100, 0.4  # simulated seconds in a real one; of a sweep


Figures = Callable[..., dict[str, Any]]


@pytest.fixture
def figures_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Figures:
    """Runs a benchmark in this process, which has its programs forked, and returns its JSON line."""

    def run(main: Callable[[], None], *flags: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["benchmark", *flags])
        main()
        figures: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return figures

    return run


def test_sessions_are_measured_and_several_are_predicted_from_single_ones(tmp_path: Path, figures_of: Figures) -> None:
    """As docs/capacity.md has it. How near predictions come is for a machine that does nothing else."""
    profile, rounds = str(write_profile(tmp_path, clock_scale=SCALE)), tmp_path / "rounds.json"
    measured = figures_of(
        sessions.main, "--simulate", profile, "--sessions", "1", "2", "--max-tokens", "16", "--repeats", "1",
        "--rounds", str(rounds), "--orchestrator-flags=--planner fixed --budget 16",
    )  # fmt: skip
    assert measured["unequal_streams"] == measured["lost_tokens"] == measured["repeated_tokens"] == 0
    assert set(measured["tokens_per_second"]) == {"1", "2"}
    assert sorted(run.num_sessions for run in read_runs(rounds)) == [1, 1, 2]
    found = figures_of(capacity.main, "--sessions", str(rounds), "--prior", profile)["sessions"]
    assert found["fitted"]["size"][0] == 16
    assert found["fitted"]["target"]["link_seconds"] > LINK / SCALE
    for each in found["by_number"].values():
        assert 1 / 3 < each["predicted_tokens_per_second"] / each["tokens_per_second"] < 3
        assert 1 / 3 < each["predicted_p95_seconds"] / each["p95_seconds"] < 3


def test_a_tenant_is_measured_while_other_sessions_hold_all_kv(figures_of: Figures) -> None:
    found = figures_of(tenants.main, "--kv-tokens", "1024")
    assert found["sessions"] == 2
    assert found["first_token_seconds"].keys() == {"alone", "beside"}
