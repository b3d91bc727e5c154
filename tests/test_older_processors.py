"""Kernels as they are compiled for processors of fewer instructions than this one may have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bough.model.vectors import has_feature

HERE = Path(__file__).parent
FEATURES = "sse sse2 sse3 ssse3 sse4.1 sse4.2 popcnt avx avx2 fma f16c bmi bmi2 lzcnt movbe"
TESTS = ["test_row_products.py", "test_project.py"]


@pytest.mark.skipif(not has_feature("avx512f"), reason="this processor runs the other tests with the same instructions")
def test_products_without_avx512() -> None:
    features = ",".join(f"+{name}" for name in FEATURES.split())
    processor = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features, "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-m", "pytest", "-q", *(str(HERE / name) for name in TESTS)]
    run = subprocess.run(command, env={**os.environ, **processor}, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:]
