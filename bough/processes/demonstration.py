"""The demonstration model on this machine: written once, by whichever process needs it first."""

from __future__ import annotations

import fcntl
import sys
from contextlib import suppress
from pathlib import Path

from bough.config.cache_paths import DEMONSTRATION_COPIES, demonstration_folder, is_written, make_space
from bough.errors import ConfigError
from bough.processes.exit_with_parent import python, run
from bough.tokenization.demonstration_template import has_template, write_template


def ensure_demonstration(copies: int = DEMONSTRATION_COPIES) -> None:
    """Write the demonstration model unless it exists, in a separate process and under a file lock.

    Raises:
        ConfigError: it could not be written.
    """
    folder = demonstration_folder(copies)
    if is_written(folder, copies):
        if not has_template(folder):
            with suppress(OSError):  # a folder that is not writable keeps its template without tools
                write_template(folder)
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_written(folder, copies):
                make_space(folder, copies)
                _write_demonstration(folder, copies)
    except OSError as exc:
        raise ConfigError(f"{folder}: {exc}; set BOUGH_CACHE_DIR to a folder that can be written to") from exc


def _write_demonstration(folder: Path, copies: int) -> None:
    if not sys.stderr.isatty():  # on a terminal the process shows its progress
        print(f"writing the demonstration model to {folder}", file=sys.stderr)
    if run(python("bough.model.write_demonstration", str(folder), str(copies))) != 0:
        raise ConfigError(f"{folder}: the demonstration model could not be written")
