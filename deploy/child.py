"""Start and stop a replica's program."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bough.processes.child import Child, end, open_child

logger = logging.getLogger(__name__)

FOLDER_NAME = "bough"  # in the system's folder for temporary files


def start(
    name: str,
    command: Sequence[str],
    variables: Mapping[str, str],
    niceness: int = 0,
    log_folder: str = "",
    held: Sequence[int] = (),
) -> Child:
    """Start a program that ends with this process, however that ends; it inherits the file descriptors `held`.

    Where its niceness may not be set (only root may lower it), it keeps this process's, with a warning.
    """
    folder = Path(log_folder) if log_folder else Path(tempfile.gettempdir()) / FOLDER_NAME
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".log", dir=folder, delete=False) as log:
        child = open_child(name, command, Path(log.name), variables, held)
    try:
        os.setpriority(os.PRIO_PROCESS, child.process.pid, niceness)
    except PermissionError:
        logger.warning("niceness %d is not allowed here; RAY_worker_niceness=%d would give it", niceness, niceness)
    except ProcessLookupError:
        pass
    return child


def describe_end(child: Child) -> str:
    """Return how a program ended and the last lines of its log."""
    return f"{child.name} {child.how_it_ended()}; the last lines of {child.log}:\n{child.tail()}"


async def stop(child: Child, drain_seconds: float, log_folder: str = "") -> None:
    """Let a program drain for `drain_seconds`, and end it (see `end`).

    The log is deleted after exit status 0, unless `log_folder` asks to keep logs.
    """
    if child.has_ended():
        return
    await asyncio.to_thread(end, [child], drain_seconds)
    if child.process.returncode == 0 and not log_folder:
        child.log.unlink(missing_ok=True)
