"""`bough demo`: what its runs are summed up to, and the whole of it on simulated workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bough.cli.machine.demo import Contest, Run, Side, demo
from bough.cli.main import argument_parser, main
from bough.errors import ConfigError
from bough.processes.exit_with_parent import MODULE
from bough.protocol.decision import Decision, Mode, RoundTimings
from bough.protocol.generation import Tokens
from tests.fakes.simulated import write_profile

ROOT = Path(__file__).parents[3]


def a_run(rounds: Sequence[Sequence[int]], seconds: float, nodes: Sequence[int] = ()) -> Run:
    """A request whose rounds took these seconds."""
    now = 0.0

    def clock() -> float:
        return now

    run = Run(clock)
    for tokens in rounds:
        now += seconds
        count = len(tokens)
        timings = RoundTimings(total_ns=int(seconds * 1e9), draft_ns=int(seconds * 1e8))
        run.add(Tokens(tuple(tokens), (True,) * count, ("x",) * count, (), 4, 2, timings))
    run.decisions = [Decision(1, Mode.DRAFT, num_sent=count + 1, num_left_out=1) for count in nodes]
    return run


WARM = Side("self-sized, warm", [a_run([[1], [2, 3, 4]], 1.0, [5, 9]), a_run([[1], [2, 3, 4]], 2.0, [5, 11])])
FIXED = {
    4: Side("best fixed: 4", [a_run([[1], [2], [3], [4]], 1.0)]),
    16: Side("best fixed: 16", [a_run([[1], [2, 3], [4]], 1.0)]),
}
FIRST = Side("self-sized, cold", [a_run([[1, 2], [3, 4, 5], [6, 7, 8]], 2.0, [3, 7])])
PLAIN = Side("plain", [a_run([[token] for token in range(1, 9)], 1.5)])


def test_a_rate_excludes_the_round_that_reads_the_prompt() -> None:
    assert FIRST.tokens_per_second == 6 / 4
    assert FIRST.first_token_seconds == 2.0
    assert FIRST.tokens_per_round == 8 / 3
    assert FIRST.mean_seconds("draft_ns") == pytest.approx(0.2)
    assert Side("one round", [a_run([[1, 2]], 1.0)]).tokens_per_second == 0.0


def test_runs_of_a_side_are_weighted_by_their_time() -> None:
    """Not the mean of rates, which a fast moment would win."""
    assert WARM.tokens_per_second == 6 / 3
    assert WARM.mean_nodes == 7.5
    assert WARM.first_token_seconds == 1.5


def test_self_sized_trees_are_compared_with_the_best_size_in_hindsight() -> None:
    contest = Contest(FIRST, PLAIN, WARM, FIXED)
    assert contest.best_fixed == 16
    assert contest.self_sized_over_best_fixed == pytest.approx(2 / 1.5)
    assert contest.speedup == pytest.approx(1.5 / (1 / 1.5))
    summary = contest.summary()
    assert summary["self_sized_over_best_fixed"] == 1.333
    assert summary["best_fixed_nodes"] == 16
    assert summary["fixed_tokens_per_second"] == {"4": 1.0, "16": 1.5}
    assert summary["nodes"] == [3, 7]
    assert summary["warm_nodes"] == [[5, 9], [5, 11]]
    text = "\n".join(contest.table())
    assert next(contest.table()).split("  ")[-1].strip() == "plain"
    assert "best fixed: 16" in text
    assert "best fixed: 4" not in text
    assert "over the best of 4, 16 nodes, chosen in hindsight: 1.33; both on the first 4 tokens only, 2 times" in text


def test_a_requested_size_is_only_compared_with_plain_decoding() -> None:
    contest = Contest(FIRST, PLAIN)
    assert "best_fixed_nodes" not in contest.summary()
    assert contest.best_fixed == 0
    assert contest.self_sized_over_best_fixed == 0.0
    assert "hindsight" not in "\n".join(contest.table())


@pytest.mark.parametrize("wrong", ["first", "warm", "fixed"])
def test_a_single_different_token_is_reported(wrong: str) -> None:
    other = Side("other", [a_run([[1], [2, 9]], 1.0)])
    right = Contest(FIRST, PLAIN, WARM, FIXED)
    assert right.is_same
    contest = replace(right, **{wrong: {4: other} if wrong == "fixed" else other})
    assert not contest.is_same
    assert contest.summary()["same_tokens"] is False
    assert "NO" in "\n".join(contest.table())


def test_a_first_run_that_is_cut_short_counts_as_different() -> None:
    short = Side("short", [a_run([[1, 2], [3]], 1.0)])
    assert not Contest(short, PLAIN).is_same


def ran(tmp_path: Path, *flags: str) -> tuple[str, dict[str, object]]:
    """What the command printed, and its last line's JSON."""
    command = [sys.executable, *MODULE, "bough.cli.main", "demo", "--simulate", str(write_profile(tmp_path)), *flags]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert outcome.returncode == 0, outcome.stderr
    assert len(outcome.stderr.splitlines()) <= 5, "without a terminal a start is reported in few lines"
    return outcome.stdout, json.loads(outcome.stdout.splitlines()[-1])


@pytest.mark.pipeline
def test_the_demonstration_runs_on_simulated_workers(tmp_path: Path) -> None:
    text, summary = ran(tmp_path, "--max-tokens", "32")
    assert summary["same_tokens"] is True
    assert summary["num_tokens"] == 32
    assert summary["best_fixed_nodes"] in (4, 16, 64)
    assert isinstance(summary["self_sized_over_best_fixed"], float)
    assert isinstance(summary["nodes"], list)
    assert max(summary["nodes"]) > 1
    assert "Workers were simulated" in text
    assert "2.1 GB" not in text.splitlines()[-2]


@pytest.mark.pipeline
def test_a_tree_size_can_be_requested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has the command's programs forked."""
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["demo", "--simulate", str(write_profile(tmp_path)), "--max-tokens", "20", "--budget", "4"])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    nodes = summary["nodes"]
    assert isinstance(nodes, list)
    assert max(nodes) == 4
    assert "best_fixed_nodes" not in summary


def test_an_answer_that_is_too_short_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        argument_parser().parse_args(["demo", "--max-tokens", "8"])
    assert "--max-tokens: must be a whole number, 16 or more, got '8'" in capsys.readouterr().err


async def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(ConfigError, match="no-such-profile"):
        await demo(argument_parser().parse_args(["demo", "--simulate", "no-such-profile"]))


def test_make_demo_installs_only_what_the_demonstration_needs(tmp_path: Path) -> None:
    """Ray, locust, clients of others, and tools of developers took longer to install than everything else."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL")}
    printed = {
        target: subprocess.run(
            ["make", "--dry-run", f"VENV={tmp_path}", target], cwd=ROOT, env=environment, text=True, capture_output=True
        ).stdout
        for target in ("demo", "test")
    }
    chosen = {target: re.findall(r"--editable '\.\[(.*?)\]'", text) for target, text in printed.items()}
    assert chosen["demo"] == ["worker"]
    assert {"dev", "loadtest", "serve", "clients"} < set(chosen["test"][0].split(","))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = " ".join([*extras["worker"], *extras["orchestrator"]])
    assert {name for each in extras["worker"] for name in re.findall(r"bough\[(\w+)\]", each)} == {"orchestrator"}
    for name in ("ray", "locust", "langchain", "litellm", "openai", "mypy", "ruff", "pytest", "matplotlib"):
        assert not re.search(rf"\b{name}\b", wanted), name


@pytest.mark.parametrize(("first", "second"), [("demo", "test"), ("test", "demo")])
def test_either_environment_can_be_created_first(tmp_path: Path, first: str, second: str) -> None:
    """What the suite needs has all that the demonstration needs, but not the other way."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL")}
    (tmp_path / "bin").mkdir()
    for name in ("python", "pip"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    stamps = {"demo": tmp_path / ".demo", "test": tmp_path / ".ready"}

    def make(*arguments: str) -> str:
        command = ["make", f"VENV={tmp_path}", f"PYTHON={tmp_path}/bin/python", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=True).stdout

    make(str(stamps[first]))
    installs = "pip install" in make("--dry-run", str(stamps[second]))
    assert installs is (first == "demo")
