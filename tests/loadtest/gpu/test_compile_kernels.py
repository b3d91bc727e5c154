"""Every kernel compiles for GPUs that are not here, within their registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; builds of torch for GPUs bring it")


def test_kernels_compile_for_the_oldest_and_the_newest(tmp_path: Path) -> None:
    """Those between: `python -m loadtest.gpu.compile_kernels`."""
    command = [sys.executable, "-m", "loadtest.gpu.compile_kernels", "--capabilities", "80", "120", "--only", "bf16"]
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["kernels"]) == 2 * 8
    most = {kernel["name"]: kernel["registers"] for kernel in found["kernels"]}
    assert all(most[name] <= 168 for name in most if "attention" not in name), "three blocks of 128 threads at least"
