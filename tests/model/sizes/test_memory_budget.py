"""Memory budgets, measured: the peak of a process that streams, against its configured memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bough.config.parsers import parse_bytes

SPARE_BYTES = 120_000_000  # tokenizer, compiled kernels, stacks of threads: nothing that grows with the model
RING_BYTES = 40_000_000
WARM_BYTES = 2 * 7_100_000  # two layers
OTHER_READS = 60_000_000  # tokenizer, configuration, modules that are imported late

BUDGETS = ("250MB", "2GB")  # of which the first holds some of the layers, the second all

# SmolLM2 as it is: 30 layers of 7 MB, and embeddings of 57 MB. Each budget's target is a process of its own, forked
# from one that has imported what all of them need and computes nothing itself.
MEASURE = """
import json, os, sys
from pathlib import Path

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

from bough.model.architecture.light_imports import import_transformers

import_transformers()  # as a target worker does
from bough.config.processes import TargetConfig, parse
from bough.protocol.ids import ScopedId
from bough.protocol.messages import Context, VerifyCall
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree import Tree
from target_worker.sweep.held_layers import compile_target
from target_worker.worker import TargetWorker
compile_target("bfloat16", "whole")  # what a process has waited for counts as read by who waited
import numba, transformers.models.llama.modeling_llama
numba.njit(lambda x: x + 1)(1)

def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])

def measured(flags):
    before, read_before = status("VmRSS"), bytes_read()
    worker = TargetWorker(parse(TargetConfig, "t", flags, {}), "measured")
    read_at_start = bytes_read() - read_before
    tokens = list(range(100, 400))
    tree = Tree.of([7] + list(range(1000, 1127)), [-1] + list(range(127)), [0.0] * 128)
    call = VerifyCall(Context.of(ScopedId("s"), [*tokens, 7], 0, 301), 1, 0, tree, SamplingParams(temperature=0.0))
    worker.verify(call).result()
    result = {"peak": status("VmHWM"), "before": before, "read_at_start": read_at_start}
    result["link_bytes"] = worker.info().link_bytes_per_pass
    worker.close()
    return result

for budget in sys.argv[1].split(","):
    if not (child := os.fork()):
        print(json.dumps(measured([*sys.argv[2:], "--device-memory", budget])), flush=True)
        os._exit(0)
    assert not os.waitpid(child, 0)[1]
"""


@pytest.fixture(scope="module")
def measured(smollm: Path) -> dict[str, dict[str, int]]:
    """What the target of each budget took, and read."""
    flags = f"--kv-memory 60MB --max-context 1024 --max-nodes 128 --max-sweep-tokens 256 --ring-memory {RING_BYTES}"
    flags += " --metrics-port -1"
    command = [sys.executable, "-c", MEASURE, ",".join(BUDGETS), "--model", str(smollm), *flags.split()]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return dict(zip(BUDGETS, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_peak_stays_within_the_budget_and_a_constant(
    smollm: Path, measured: dict[str, dict[str, int]], budget: str
) -> None:
    found = measured[budget]
    taken = found["peak"] - found["before"]
    assert taken <= parse_bytes(budget) + SPARE_BYTES
    is_whole = budget == "2GB"
    assert (found["link_bytes"] == 0) == is_whole, "what fits stays"
    model_bytes = sum(file.stat().st_size for file in smollm.glob("*.safetensors"))
    stays = model_bytes - found["link_bytes"]
    ahead = 0 if is_whole else 2 * RING_BYTES + WARM_BYTES  # of what streams, at first and after the warm-up
    assert found["read_at_start"] <= stays + ahead + OTHER_READS, "what streams is not read before it is wanted"
