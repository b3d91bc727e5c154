"""Every kernel compiles for GPUs that are not here, within their registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed; builds of torch for GPUs bring it")


def compiled(folder: Path, capabilities: Sequence[str], *only: str) -> dict[tuple[str, int], dict[str, Any]]:
    """What is said of each kernel whose name contains any of `only`, for each capability."""
    command = [sys.executable, "-m", "loadtest.gpu.compile_kernels", "--capabilities", *capabilities, "--only", *only]
    environ = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {(row["name"], row["capability"]): row for row in json.loads(done.stdout.splitlines()[-1])["kernels"]}


def test_every_family_s_kernels_compile_for_consumer_gpus(tmp_path: Path) -> None:
    """On the RTX 40 series and the L40, where most of them once spilled."""
    found = compiled(tmp_path, ["89"], "bf16", "delta")
    assert len(found) == 24 + 14 + 12 + 1
    assert all(row["registers"] <= 168 for (name, _), row in found.items() if "attention" not in name), "three blocks"


def test_kernels_compile_for_the_oldest_and_the_newest(tmp_path: Path) -> None:
    """Recurrence, unpacking, and attention that once spilled; others: `python -m loadtest.gpu.compile_kernels`."""
    shapes = "4 heads of 128 a KV head", "8 heads of 64 a KV head, sinks", "2 heads of 128 a KV head, softcap 50"
    unpacking = "bough 4 bits", "bough 8 bits", "gptq", "gptq by g_idx", "awq"
    unpacking += "compressed-tensors", "int8", "fp8", "mxfp4", "nvfp4"
    found = compiled(tmp_path, ["80", "120"], "delta", *(f"{name}, bf16" for name in (*shapes, *unpacking)))
    assert len(found) == 2 * (1 + 3 + 10)
