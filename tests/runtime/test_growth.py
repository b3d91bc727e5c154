"""A draft worker's memory, measured: what it has after a request it has after many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# With 14 of 30 layers the C library's own settings leave gaps of 150 MB; with 6 they would be too small to see.
DROPPED = ",".join(map(str, range(8, 24)))
GROWN_BYTES = 30_000_000  # rows of keys and values in pages of 2 MB, and Python's own: 10 MB of so many layers
GAP_BYTES = 100_000_000  # of heaps, that nothing is in; bough's settings leave 35 to 50 MB

# The process's own beginning (`bough.processes.process.run`), then sessions of all sizes, taken and given back.
SERVE = """
import ctypes, json, random, sys
from pathlib import Path
from bough.protocol.ids import ScopedId
from bough.config.processes import DraftConfig, parse
from bough.trees.tree_plan import BestFirst, TreePlan
from bough.protocol.messages import Context, GrowCall
from bough.processes.process import run
from bough.protocol.sampling_params import SamplingParams

def own_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

class Heaps(ctypes.Structure):  # as mallinfo2(3) has it
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

def gap_bytes():
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Heaps
    return mallinfo().fordblks

def session(draft, numbers, nodes, depth, width, length):
    tokens, held, name = [numbers.randrange(1000, 40000) for _ in range(length)], 0, str(numbers.random())
    for round_ in range(4):
        context = Context.of(ScopedId(name), tokens, held, length)
        plan = TreePlan(BestFirst(nodes, width, depth))
        call = GrowCall(context, tokens[-1], SamplingParams(temperature=0.0), context.base_length, plan)
        held = draft.grow(call).result().held_length
        tokens.append(numbers.randrange(1000, 40000))
    draft.release(ScopedId(name)).result()

async def main():
    from draft_worker.worker import DraftWorker
    draft = DraftWorker(parse(DraftConfig, "d", sys.argv[1:], {}), "measured")
    numbers = random.Random(1)
    session(draft, numbers, 4, 2, 4, 20)
    before = own_bytes()
    for index in range(24):
        nodes, depth, width = numbers.choice([4, 16, 64]), numbers.randrange(2, 12), numbers.choice([4, 8, 16])
        session(draft, numbers, nodes, depth, width, numbers.randrange(20, 200))
    print(json.dumps({"before": before, "after": own_bytes(), "gaps": gap_bytes()}))
    draft.close()

run(main)
"""


@pytest.mark.long
def test_a_draft_worker_does_not_grow_with_its_requests(smollm: Path) -> None:
    """Weights on their way, and logits of each larger batch, left gaps in heaps (`bough.runtime.allocator`)."""
    command = [sys.executable, "-c", SERVE, "--model", str(smollm), "--kv-memory", "200MB", "--max-context", "1024"]
    command += ["--drop-layers", DROPPED]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    measured = json.loads(output.splitlines()[-1])
    assert measured["after"] - measured["before"] < GROWN_BYTES
    assert measured["gaps"] < GAP_BYTES
