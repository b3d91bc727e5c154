"""Compiles kernels once, in a separate process that ends before a model is loaded.

The compiler takes 0.3 GB that its process never frees, which would count against a worker's memory budget.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bough.errors import ConfigError
from bough.processes.exit_with_parent import python, run
from bough.processes.process import stage

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 900.0
COMPILING = "compiling kernels"  # the stage's name


def require_kernel_folder() -> None:
    """Raise ConfigError unless compiled kernels can be stored; numba's error would name one of our functions."""
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as exc:
        raise ConfigError(
            f"{folder}: must be a folder that can be written to, for compiled kernels, got: {exc.strerror}; set "
            "BOUGH_CACHE_DIR to another place"
        ) from exc


def compile_in_subprocess(module: str, arguments: Sequence[str], key: str) -> bool:
    """Run `python -m MODULE ARGUMENTS` once for each `key`, under a file lock; returns whether it has succeeded.

    `key` identifies what compiled code depends on, in addition to the files whose hash is in NUMBA_CACHE_DIR. On
    failure, which is logged, a worker compiles lazily in its own memory.
    """
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    done = folder / "-".join((module, *arguments, key))
    if done.exists():
        return True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with done.with_name(f"{done.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                stage(COMPILING)
                compile_in_a_process(module, arguments)
                done.touch()
    except (OSError, subprocess.SubprocessError) as exc:
        logger.warning("kernels could not be compiled in a separate process (%s)", exc)
        return False
    return True


def compile_in_a_process(module: str, arguments: Sequence[str]) -> None:
    """Run the module that compiles; raises subprocess.SubprocessError if it fails or times out."""
    command = python("bough.model.architecture.light_imports", module, *arguments)
    status = run(
        command, lambda line: subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=sys.stderr), TIMEOUT_SECONDS
    )
    if status != 0:
        raise subprocess.CalledProcessError(status, command)
