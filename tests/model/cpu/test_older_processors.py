"""Kernels as they are compiled for other processors than this one may be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import pytest

from bough.model.cpu.llvm_vectors import has_feature

HERE = Path(__file__).parent
FEATURES = "sse sse2 sse3 ssse3 sse4.1 sse4.2 popcnt avx avx2 fma f16c bmi bmi2 lzcnt movbe"
IN_8_BITS = "test_int8.py::test_products_of_any_number_of_rows"
IN_16_BITS = ["test_linear.py", "test_gemm_parallel.py", "test_kernels.py"]
ELSEWHERE = "settings_of_the_compiler or every_decorator or without_an_instruction"  # what no processor changes
BY_PAIRS = ["test_linear.py", "test_gemm_parallel.py"]  # attention and products in 8 bits have no pairs of bfloat16
TESTS = {"": [*IN_16_BITS, IN_8_BITS], "avxvnni": [IN_8_BITS]}


@pytest.mark.long
@pytest.mark.skipif(not has_feature("avx512f"), reason="this processor runs the other tests with the same instructions")
@pytest.mark.parametrize("more", TESTS)
def test_products_without_avx512(more: str) -> None:
    if more and not has_feature(more):
        pytest.skip(f"this processor has no {more}")
    features = ",".join(f"+{name}" for name in f"{FEATURES} {more}".split())
    check_as({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features, "ATEN_CPU_CAPABILITY": "avx2"}, TESTS[more])


@pytest.mark.long
@pytest.mark.skipif(not has_feature("avx512bf16"), reason="this processor does not multiply bfloat16 by pairs")
def test_products_by_pairs_like_on_amd() -> None:
    """Intel's processors have the instruction, and do without it."""
    own = llvmlite.binding.get_host_cpu_features()
    features = ",".join(f"{'+' if has else '-'}{name}" for name, has in own.items())
    check_as({"NUMBA_CPU_NAME": "znver4", "NUMBA_CPU_FEATURES": features}, BY_PAIRS)


def check_as(processor: dict[str, str], tests: list[str]) -> None:
    """Tests in a process that compiles for another processor."""
    command = [sys.executable, "-m", "pytest", *(str(HERE / name) for name in tests), "-k", f"not ({ELSEWHERE})"]
    run = subprocess.run(command, env={**os.environ, **processor}, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:]
