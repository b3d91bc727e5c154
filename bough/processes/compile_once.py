"""Has kernels compiled in a process of its own, once: the compiler takes 0.3 GB that a process keeps.

A worker has a budget for its memory, and may run where there is not much more, so it leaves the compiling to another
process that ends before a model is opened.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bough.processes.exit_with_parent import MODULE, run

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 900.0


def compile_apart(module: str, arguments: Sequence[str], ground: str) -> bool:
    """Runs `python -m MODULE ARGUMENTS` unless it has been done on this ground; whoever else wants it meanwhile waits.

    `ground` is what compiled code depends on beside the files that NUMBA_CACHE_DIR is named after. Where it cannot be
    done, which is logged and False, a worker compiles as it goes, and takes the more memory.
    """
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    done = folder / "-".join((module, *arguments, ground))
    if done.exists():
        return True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with done.with_name(f"{done.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                logger.info("compiling kernels for %s in a process of its own", " ".join(arguments))
                compile_in_a_process(module, arguments)
                done.touch()
    except (OSError, subprocess.SubprocessError) as exc:
        logger.warning("kernels could not be compiled apart (%s)", exc)
        return False
    return True


def compile_in_a_process(module: str, arguments: Sequence[str]) -> None:
    """Raises subprocess.SubprocessError where it fails or takes too long."""
    command = [sys.executable, *MODULE, "bough.model.architecture.light_imports", module, *arguments]
    status = run(
        command, lambda line: subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=sys.stderr), TIMEOUT_SECONDS
    )
    if status != 0:
        raise subprocess.CalledProcessError(status, command)
