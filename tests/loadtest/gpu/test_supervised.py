"""Parts of the GPU check that fail, hang, or end their process: what the others found is kept."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loadtest.gpu.supervised import Part, results_of

WORKER = """
import os, subprocess, sys, time
from loadtest.gpu.supervised import READY, say
found, *parts = sys.argv[1:]
if parts[0] == "unready":
    raise ImportError("no torch")
say(READY)
for part in parts:
    print("for people:", part, flush=True)
    if part == "fails":
        say(part, error="RuntimeError: wrong")
        raise SystemExit(1)
    if part == "hangs":
        say(part, so_far=[1])
        say(part, so_far=[1, 2])
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(os.environ["CHILD"], "w").write(str(child.pid))
        time.sleep(60)
    if part == "dies":
        print("CUDA error: an illegal memory access was encountered", flush=True)
        os._exit(3)
    say(part, value={"found": found, "by": os.getpid()})
"""


def run(
    names: Sequence[str], seconds: float, limit: float = 30, noted: list[tuple[int, int]] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """`noted` gets the numbers of parts that have results, and that have failed, whenever these are reported."""

    def note(found: dict[str, Any], failed: dict[str, str]) -> None:
        (noted if noted is not None else []).append((len(found), len(failed)))

    def command(parts: Sequence[str], found: dict[str, Any]) -> list[str]:
        return [sys.executable, "-c", WORKER, "+".join(found), *parts]

    return results_of([Part(name, 2.0 if name == "hangs" else limit) for name in names], command, seconds, note)


def is_running(pid: int) -> bool:
    """Not if it is gone, or waits only to be asked how it ended."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_a_failed_part_does_not_affect_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    noted: list[tuple[int, int]] = []
    found, failed = run(["a", "b", "fails", "c", "hangs", "d", "dies", "e"], 600, noted=noted)
    assert list(found) == ["a", "b", "c", "hangs", "d", "e"]
    assert found["hangs"] == [1, 2], "what it had found until then"
    assert noted == [(1, 0), (2, 0), (2, 1), (3, 1), (4, 1), (4, 1), (4, 2), (5, 2), (5, 3), (6, 3)]
    assert found["a"]["by"] == found["b"]["by"] != found["c"]["by"], "a process goes on while nothing fails"
    assert [found[name]["found"] for name in "bcde"] == ["", "a+b", "a+b+c+hangs", "a+b+c+hangs+d"], (
        "it is told what there is"
    )
    assert failed["fails"] == "RuntimeError: wrong"
    assert failed["hangs"] == "no result within 2 seconds"
    assert failed["dies"] == (
        "its process ended with status 3: for people: dies; CUDA error: an illegal memory access was encountered"
    )
    assert "for people: a\n" in capsys.readouterr().out
    child = int((tmp_path / "child").read_text())
    for _ in range(500):
        if not is_running(child):
            break
        time.sleep(0.02)
    assert not is_running(child), "what a part has started ends with it"


def test_a_process_that_does_not_start_fails_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    found, failed = run(["unready", "a"], 600)
    assert failed["unready"].endswith("ImportError: no torch")
    assert list(found) == ["a"]


def test_parts_without_remaining_time_are_named() -> None:
    found, failed = run(["a", "b"], 0.0)
    assert (found, failed) == ({}, dict.fromkeys("ab", "not started: no time was left"))
