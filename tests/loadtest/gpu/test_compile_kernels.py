"""Every kernel compiles for GPUs that are not here, within their registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """Those of every family for the RTX 40 series and the L40; recurrence, unpacking, and attention that once spilled
    for the oldest and the newest. Others: `python -m loadtest.gpu.compile_kernels`.

    Kernels that have not changed come from Triton's cache. One is compiled again if what the compiler reported was not
    cached, as after a run on a GPU. All is one test, as the process that compiles takes ten seconds to start.
    """
    command = [sys.executable, "-c", COMPILE, json.dumps(RUNS)]
    environ = {**os.environ, "EMPTY": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if not line.startswith("Compiled(")]
    consumer, status, oldest_and_newest, other_status, (anew, from_the_cache, without_a_log) = lines
    assert (status, other_status) == (0, 0), lines
    assert len(consumer["kernels"]) == 24 + 12 + 12 + 1 + 23
    for row in consumer["kernels"]:
        assert row["registers"] <= 168 or "attention" in row["name"], "three blocks"
    assert len(oldest_and_newest["kernels"]) == 2 * (1 + 3 + 8)
    assert from_the_cache == 7
    assert anew == without_a_log != 7
