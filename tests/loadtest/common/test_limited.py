"""Limits of load tests: what is written to control groups of both versions. That they hold is the kernel's business."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from loadtest.common import limits


@pytest.mark.parametrize("version", [1, 2])
def test_control_groups_get_the_limits(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    device = os.stat(tmp_path).st_dev
    disk = f"{os.major(device)}:{os.minor(device)}"
    if version == 1:
        for controller in ("memory", "blkio"):
            (tmp_path / controller).mkdir()
        wanted = {"memory.limit_in_bytes": "1000", "blkio.throttle.read_bps_device": f"{disk} 2000"}
    else:
        (tmp_path / "cgroup.controllers").write_text("cpu io memory")
        wanted = {"memory.max": "1000", "io.max": f"{disk} rbps=2000"}
    with limits.limited(1000, 2000, tmp_path) as prefix:
        found = {file.name: file.read_text() for file in tmp_path.rglob("bough-*/*")}
        assert found == wanted
        subprocess.run([*prefix, "true"], check=True)
    joined = list(tmp_path.rglob("bough-*/cgroup.procs"))
    assert len(joined) == (2 if version == 1 else 1)
    assert all(file.read_text().strip().isdecimal() for file in joined)


def test_without_control_groups_there_are_no_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "none")
    monkeypatch.setattr(limits, "cache_folder", lambda: tmp_path)
    assert not limits.can_limit()
