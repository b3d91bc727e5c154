"""`python -m bough.model.preload`: imports once what both workers of a machine import, and becomes each of them.

Two workers that import torch, transformers and numba each on their own hold the same 200 MB twice, and spend the same
processor seconds on it. Forked from one process that has imported them, they share every page that neither writes to.
No gRPC is among what is imported: it starts threads, and a fork must come before those.

Standard input has the programs, as `bough.processes.forked` writes them; standard output gets the ids of their
processes. Then this process ends, which leaves them to the nearest process above that adopts orphans
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
import runpy
import sys
import time
from collections.abc import Mapping
from typing import Any

from bough.model.architecture.light_imports import import_transformers
from bough.processes.exit_with_parent import end_with_parent
from bough.runtime.allocator import configure_allocator, trim_heap

SHARED = (
    "bough.model.loading.loading",
    "bough.model.checkpoint.tokenizer_files",
    "bough.model.kv.kv_arena",
    "bough.model.cpu.threads",
)
GO = b"g"  # said to a forked process once its id has been printed
ADOPTED_SECONDS = 0.001  # between looks at who the parent is


def main() -> None:
    """Imports, forks each program, and ends; in a forked process this returns when its program does."""
    adopter = os.getppid()
    programs = json.load(sys.stdin)
    configure_allocator()
    import_shared()
    forked: dict[int, int] = {}  # where to say that a process may go on, by its id
    for program in programs:
        reads, writes = os.pipe()
        if (process_id := os.fork()) == 0:
            os.close(writes)
            if _may_go_on(reads, adopter):
                _become(program, adopter)
            return
        os.close(reads)
        forked[process_id] = writes
    print(json.dumps(list(forked)), flush=True)
    for writes in forked.values():
        os.write(writes, GO)
    os._exit(0)


def import_shared() -> None:
    """Everything heavy that both workers use, and numba's tables of what it can compile."""
    import_transformers()
    for name in SHARED:
        importlib.import_module(name)
    target: Any = importlib.import_module("numba.core.registry").cpu_target
    target.typing_context.refresh()  # as before the first kernel is loaded
    target.target_context.refresh()
    gc.collect()
    gc.freeze()  # what a collection marks it writes to, and a page that is written to is shared no longer
    trim_heap()


def _may_go_on(reads: int, adopter: int) -> bool:
    """Waits until this process is known to, and a child of, whoever asked for it; False where that one has ended."""
    if os.read(reads, 1) != GO:
        return False
    os.close(reads)
    preloader = os.getppid()
    while preloader != adopter and os.getppid() == preloader:
        time.sleep(ADOPTED_SECONDS)
    return os.getppid() == adopter


def _become(program: Mapping[str, Any], adopter: int) -> None:
    """Runs a module as `python -m` would, in a session of its own, with its own log, variables and arguments."""
    end_with_parent(adopter)
    os.setsid()
    for path, flags, descriptors in (
        (os.devnull, os.O_RDONLY, (0,)),
        (program["log"], os.O_WRONLY | os.O_APPEND, (1, 2)),
    ):
        opened = os.open(path, flags)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.update(program["variables"])
    sys.argv = [program["module"], *program["arguments"]]
    runpy.run_module(program["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
