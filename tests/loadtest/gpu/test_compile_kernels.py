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
from importlib.metadata import version
from pathlib import Path

for flags in json.loads(sys.argv[1]):
    sys.argv[1:] = ["--tritons", version("triton"), *flags]
    try:
        runpy.run_module("loadtest.gpu.compile_kernels", run_name="__main__")
    except SystemExit as ended:
        print(ended.code)
os.environ["TRITON_CACHE_DIR"] = os.environ["EMPTY"]
from bough.model.backends.triton import BACKEND
from loadtest.gpu.compile_kernels import LOG, _programs, compiled, kernels

kernel = next(kernel for kernel in kernels() if kernel.name == "unpacking, int8, bf16")
registers = [compiled(kernel, 89).registers]
(log,) = Path(os.environ["EMPTY"]).rglob(LOG)
log.write_text(re.sub(r"Used \d+ registers", "Used 7 registers", log.read_text()))
registers.append(compiled(kernel, 89).registers)
log.unlink()
registers.append(compiled(kernel, 89).registers)
with _programs(89, kernel.function) as programs:
    kernel.calls[0]()
((made, _),) = programs.values()
before, made.n_spills = BACKEND.spilling(), 2  # which Triton sets when it loads a program
print(json.dumps([*registers, [*before], [*BACKEND.spilling()] == [made.name]]))
"""
SPILLED_ONCE = "4 heads of 128 a KV head", "8 heads of 64 a KV head, sinks", "2 heads of 128 a KV head, softcap 50"
PRODUCTS = "16 bits", "gptq 4 bits", "awq 4 bits", "mxfp4 4 bits", "Q4_K"
UNPACKING = "gptq 4 bits", "gptq 4 bits by g_idx", "awq 4 bits"
UNPACKING += "compressed-tensors 4 bits", "int8", "fp8 8 bits", "mxfp4 4 bits", "nvfp4 4 bits"
RUNS = (
    ["--capabilities", "89", "--only", "^(?!product).*bf16", "^gated", "^table"],
    ["--capabilities", "80", "120", "--only", "delta", *(f"{name}, bf16" for name in SPILLED_ONCE)],
    ["--capabilities", "80", "120", "--only", *(f"unpacking, {name}, bf16" for name in UNPACKING)],
    ["--capabilities", "89", "90", "--only", *(f"^product, {name}, (16|128|by expert), bf16" for name in PRODUCTS)],
)


def test_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """Those of every family for the RTX 40 series and the L40; recurrence, unpacking, and attention that once spilled
    for the oldest and the newest; some products, also for the H100, whose instructions are others. For the rest:
    `python -m loadtest.gpu.compile_kernels`.

    Kernels that have not changed come from Triton's cache. One is compiled again if what the compiler reported was not
    cached, as after a run on a GPU. All is one test, as the process that compiles takes ten seconds to start.
    """
    command = [sys.executable, "-c", COMPILE, json.dumps(RUNS)]
    environ = {**os.environ, "EMPTY": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if not line.startswith("Compiled(")]
    *reports, (anew, from_the_cache, without_a_log, before, spills) = lines
    assert reports[1::2] == [0] * len(RUNS), lines
    kernels = [report["kernels"] for report in reports[::2]]
    assert list(map(len, kernels)) == [2 * 24 + 23 + 2 + 24, 2 * (1 + 2 * 3), 2 * 8, 2 * 5 * 3]
    for row in kernels[0]:
        assert row["registers"] <= 168 or "attention" in row["name"], "three blocks"
    assert {tuple(row["products"]) for row in kernels[3]} == {("m16n8k16",), ("m64n64k16",)}
    assert from_the_cache == 7
    assert anew == without_a_log != 7
    assert (before, spills) == ([], True), "of programs that a GPU has loaded"


@pytest.mark.long
def test_launches_of_a_layer_are_within_the_commands_budget(tmp_path: Path) -> None:
    """Without an environment that compiles for GPUs, as the command counts them in its process."""
    code = """
import json, sys
from pathlib import Path

import loadtest.gpu.compile_kernels as command
from tests.fakes.gpu.launches import launches_per_layer

print(json.dumps([launches_per_layer(Path(sys.argv[1])), command.MOST_LAUNCHES]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    counted, most = json.loads(done.stdout.splitlines()[-1])
    assert counted.keys() == most.keys()
    assert all(counted[kind] <= most[kind] for kind in most), counted
