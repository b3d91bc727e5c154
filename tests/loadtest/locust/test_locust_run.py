"""`make loadtest` end to end, for seconds: locust's processes, both apis, the report and the JSON line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.cluster
@pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="importing it here would patch ssl and threads")
def test_users_are_answered_over_both_apis(tmp_path: Path) -> None:
    flags = ("--users", "4", "--seconds", "5", "--mix", "20:16:1", "--html", str(tmp_path / "report.html"))
    command = [line for line in (ROOT / "Makefile").read_text().splitlines() if "-m loadtest.locust" in line]
    _, *arguments = command[0].split()
    done = subprocess.run([sys.executable, *arguments, *flags], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["failed"] == 0, figures
    for api in ("grpc", "http"):
        assert figures["doors"][api]["requests"] > 0, api
    assert "locust" in (tmp_path / "report.html").read_text().lower()
