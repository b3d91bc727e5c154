"""`bough doctor --json`, for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bough.cli.flags.reaching import MISSING
from bough.cli.inspection.doctor import doctor
from bough.cli.main import argument_parser
from bough.errors import ConfigError
from tests.fakes.simulated import pair_of
from tests.fakes.stack import simulated_stack


async def test_doctor_json_prints_one_line_for_a_running_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with simulated_stack(tmp_path, pair_of(tmp_path)) as stack:
        address = stack.addresses["orchestrator"]
        assert await doctor(argument_parser().parse_args(["doctor", "--json", "--address", address])) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["address"] == address
    assert report["problems"] == []
    assert {worker["info"]["kind"] for worker in report["server"]["workers"]} == {"target", "draft"}
    assert report["loads"]["num_requests_running"] == 0


async def test_doctor_json_reports_a_missing_server_as_the_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert await doctor(argument_parser().parse_args(["doctor", "--json", "--address", "127.0.0.1:1"])) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem == f"127.0.0.1:1 does not answer: nothing listens there; {MISSING}"
    assert await doctor(argument_parser().parse_args(["doctor", "--address", "127.0.0.1:1"])) == 1
    assert capsys.readouterr().out == f"problem: {problem}\n"


async def test_a_ray_cluster_has_no_json_report() -> None:
    with pytest.raises(ConfigError, match=r"^--json: must not be given with --ray, got http://h:1$"):
        await doctor(argument_parser().parse_args(["doctor", "--json", "--ray", "http://h:1"]))
