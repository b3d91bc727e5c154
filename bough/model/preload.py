"""`python -m bough.model.preload`: imports once what both workers of a machine need, and forks into both.

Two workers that import torch, transformers and numba separately hold the same 200 MB twice, and take twice the CPU
time. Forked from one process after its imports, they share all pages that neither writes to. gRPC is not imported, as
it starts threads, which must not exist before a fork.

Standard input has the programs, as written by `bough.processes.forked`; standard output gets the ids of their
processes. Then this process ends, which leaves them to the nearest ancestor that adopts orphans
(PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

# isort: off
import bough.model  # noqa: F401  # before torch, see there
# isort: on

import gc
import importlib
import json
import os
import sys
import time
from typing import Any

from bough.model.architecture.light_imports import import_transformers
from bough.processes.forked import become
from bough.runtime.allocator import configure_allocator, trim_heap

SHARED = (
    "bough.model.loading.loading",
    "bough.model.checkpoint.tokenizer_files",
    "bough.model.kv.kv_arena",
    "bough.model.cpu.threads",
)
GO = b"g"  # sent to a forked process once its id has been printed
ADOPTED_SECONDS = 0.001  # between two checks of the parent


def main() -> None:
    """Import, fork each program, and end; in a forked process this returns when its program does."""
    adopter = os.getppid()
    programs = json.load(sys.stdin)
    configure_allocator()
    import_shared()
    forked: dict[int, int] = {}  # pipe that lets a process continue, by its id
    for program in programs:
        reads, writes = os.pipe()
        if (process_id := os.fork()) == 0:
            os.close(writes)
            if _may_go_on(reads, adopter):
                become(program, adopter)
            return
        os.close(reads)
        forked[process_id] = writes
    print(json.dumps(list(forked)), flush=True)
    for writes in forked.values():
        os.write(writes, GO)
    os._exit(0)


def import_shared() -> None:
    """Import all heavy modules that both workers use, and fill numba's registries."""
    import_transformers()
    for name in SHARED:
        importlib.import_module(name)
    target: Any = importlib.import_module("numba.core.registry").cpu_target
    target.typing_context.refresh()  # done anyway before the first kernel is loaded
    target.target_context.refresh()
    gc.collect()
    gc.freeze()  # a collection writes to all objects it marks, which unshares their pages
    trim_heap()


def _may_go_on(reads: int, adopter: int) -> bool:
    """Wait until the requesting process knows and has adopted this one; False if it has ended."""
    if os.read(reads, 1) != GO:
        return False
    os.close(reads)
    preloader = os.getppid()
    while preloader != adopter and os.getppid() == preloader:
        time.sleep(ADOPTED_SECONDS)
    return os.getppid() == adopter


if __name__ == "__main__":
    main()
