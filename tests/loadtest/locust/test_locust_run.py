"""`make loadtest` end to end, for seconds: locust's processes, both doors, the report and the JSON line."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.waiting import block_until

ROOT = Path(__file__).parents[3]
WITHOUT_LOCUST = importlib.util.find_spec("locust") is None


@pytest.mark.cluster
@pytest.mark.skipif(WITHOUT_LOCUST, reason="extra `loadtest`; importing it here would patch ssl and threads")
def test_users_are_answered_through_both_doors(tmp_path: Path) -> None:
    flags = ("--users", "4", "--seconds", "5", "--mix", "20:16:1", "--html", str(tmp_path / "report.html"))
    command = [line for line in (ROOT / "Makefile").read_text().splitlines() if "-m loadtest.locust" in line]
    _, *arguments = command[0].split()
    done = subprocess.run([sys.executable, *arguments, *flags], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["failed"] == 0, figures
    for door in ("grpc", "http"):
        assert figures["doors"][door]["requests"] > 0, door
    assert "locust" in (tmp_path / "report.html").read_text().lower()


@pytest.mark.pipeline
@pytest.mark.skipif(WITHOUT_LOCUST, reason="extra `loadtest`")
def test_locust_ends_with_the_command_that_has_started_it(tmp_path: Path) -> None:
    """Its users asked on, whatever had ended the command."""
    flags = ["--address", "127.0.0.1:1", "--doors", "grpc", "--seconds", "900", "--html", str(tmp_path / "report.html")]
    command = [sys.executable, "-m", "loadtest.locust", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            block_until(children.read_text)
            locust = int(children.read_text())
        finally:
            process.kill()
        try:
            process.communicate(timeout=30)  # until locust, too, has closed the pipe
        except subprocess.TimeoutExpired:
            os.kill(locust, signal.SIGKILL)
            raise
