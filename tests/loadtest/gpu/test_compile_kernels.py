"""Every kernel compiles for GPUs that are not here, within their registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed; builds of torch for GPUs bring it")

# In one process, as it takes longer to start than to read what has been compiled before: the command as it is given,
# for each list of flags; then one kernel in an empty cache, again where its log says something else, and without it.
COMPILE = r"""
import json, os, re, runpy, sys
from pathlib import Path

for flags in json.loads(sys.argv[1]):
    sys.argv[1:] = flags
    try:
        runpy.run_module("loadtest.gpu.compile_kernels", run_name="__main__")
    except SystemExit as ended:
        print(ended.code)
os.environ["TRITON_CACHE_DIR"] = os.environ["EMPTY"]
from loadtest.gpu.compile_kernels import LOG, compiled, kernels

kernel = next(kernel for kernel in kernels() if kernel.name == "int8, bf16")
registers = [compiled(kernel, 89).registers]
(log,) = Path(os.environ["EMPTY"]).rglob(LOG)
log.write_text(re.sub(r"Used \d+ registers", "Used 7 registers", log.read_text()))
registers.append(compiled(kernel, 89).registers)
log.unlink()
print(json.dumps([*registers, compiled(kernel, 89).registers]))
"""
SPILLED_ONCE = "4 heads of 128 a KV head", "8 heads of 64 a KV head, sinks", "2 heads of 128 a KV head, softcap 50"
UNPACKING = "gptq", "gptq by g_idx", "awq"
UNPACKING += "compressed-tensors", "int8", "fp8", "mxfp4", "nvfp4"
RUNS = (
    ["--capabilities", "89", "--only", "bf16", "delta"],
    ["--capabilities", "80", "120", "--only", "delta", *(f"{name}, bf16" for name in (*SPILLED_ONCE, *UNPACKING))],
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The last two lines of each run, its figures and its status; then the registers that one kernel was said to have.

    Kernels that have not changed come from Triton's cache, like those that numba compiles from its own.
    """
    environ = {**os.environ, "EMPTY": str(tmp_path_factory.mktemp("cache"))}
    command = [sys.executable, "-c", COMPILE, json.dumps(RUNS)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if not line.startswith("Compiled(")]


def compiled(told: list[Any], run: int) -> dict[tuple[str, int], dict[str, Any]]:
    """What is said of each kernel of a run, for each capability."""
    figures, status = told[2 * run : 2 * run + 2]
    assert status == 0, figures
    return {(row["name"], row["capability"]): row for row in figures["kernels"]}


def test_every_family_s_kernels_compile_for_consumer_gpus(told: list[Any]) -> None:
    """On the RTX 40 series and the L40, where most of them once spilled."""
    found = compiled(told, 0)
    assert len(found) == 24 + 12 + 12 + 1
    assert all(row["registers"] <= 168 for (name, _), row in found.items() if "attention" not in name), "three blocks"


def test_kernels_compile_for_the_oldest_and_the_newest(told: list[Any]) -> None:
    """Recurrence, unpacking, and attention that once spilled; others: `python -m loadtest.gpu.compile_kernels`."""
    assert len(compiled(told, 1)) == 2 * (1 + 3 + 8)


def test_a_cached_kernel_is_reported_like_a_compiled_one(told: list[Any]) -> None:
    """It is compiled again if what the compiler reported was not cached, as after a run on a GPU."""
    anew, from_the_cache, without_a_log = told[-1]
    assert from_the_cache == 7
    assert anew == without_a_log != 7
