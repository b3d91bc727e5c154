"""A target that is asked for a backend computes by it and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.config.processes import TargetConfig, parse
from bough.errors import ConfigError
from bough.model.backend import REFERENCE_NOTE, computing_by
from target_worker.worker import TargetWorker

FLAGS = "--max-context 64 --kv-memory 1MB --dtype float32 --device cpu"


def worker_of(folder: Path, backend: str) -> TargetWorker:
    return TargetWorker(
        parse(TargetConfig, "t", ["--model", str(folder), "--backend", backend, *FLAGS.split()], {}), "t"
    )


def test_the_reference_is_named_in_identity_and_notes(tiny: Path) -> None:
    with computing_by("cpu"):  # what a worker chooses counts for its process
        worker = worker_of(tiny, "reference")
        try:
            info = worker.info()
        finally:
            worker.close()
    assert "by torch's operators" in info.arithmetic
    assert REFERENCE_NOTE in info.notes


def test_kernels_of_another_device_are_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--backend: must be auto, cpu or reference on cpu, got triton$"):
        worker_of(tiny, "triton")
