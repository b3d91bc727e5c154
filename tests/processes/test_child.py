"""Which record in the index is a child's own, of all that may be there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bough.processes.launch import Cluster
from bough.processes.process import new_worker_id
from bough.registry.records import WorkerRecord
from tests.conftest import settings

SAYS_ITS_NAME = "from bough.processes.process import new_worker_id; print(new_worker_id('target'), flush=True)"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(settings(tmp_path, None), tmp_path)


def test_a_child_is_recognised_by_its_name_and_a_stranger_with_its_number_is_not(cluster: Cluster) -> None:
    """Numbers come again: on this machine after a while, in other containers and on other machines at once."""
    child = cluster.start("target_worker", [sys.executable, "-c", SAYS_ITS_NAME])
    assert child.process.wait(60) == 0, child.tail()
    own = child.last_line()
    kind, pid, started, mark = own.split("-")
    assert (kind, pid) == ("target", str(child.process.pid))
    assert child.is_of(WorkerRecord("target", own, "host:1")), "also when it has ended"
    for stranger in (
        f"target-{pid}-{int(started) + 1}-{mark}",
        f"target-{pid}-{mark}",
        f"target-{pid}1-{started}-{mark}",
    ):
        assert not child.is_of(WorkerRecord("target", stranger, "host:1")), stranger
    assert not child.is_of(WorkerRecord("draft", own, "host:1"))


def test_names_are_unique() -> None:
    names = [new_worker_id("draft") for _ in range(2)]
    assert names[0] != names[1]
    assert names[0].split("-")[:2] == ["draft", str(os.getpid())]
