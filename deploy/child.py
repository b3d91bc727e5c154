"""Start and stop a replica's program."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bough.processes import exit_with_parent
from bough.processes.child import Child, process_name

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
STOP_SECONDS = 3.0  # between the second SIGTERM and SIGKILL
FOLDER_NAME = "bough"  # in the system's folder for temporary files
KILL_SECONDS = 60.0  # the kernel may take this long to end a process and free its memory


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
    with tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".log", dir=folder, delete=False) as stream:
        process = exit_with_parent.start(
            command,
            lambda tethered: subprocess.Popen(
                tethered,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **variables},
                pass_fds=held,
            ),
        )
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
    except PermissionError:
        logger.warning("niceness %d is not allowed here; RAY_worker_niceness=%d would give it", niceness, niceness)
    except ProcessLookupError:
        pass
    return Child(name, tuple(command), variables, Path(stream.name), process, process_name(process.pid))


def describe_end(child: Child) -> str:
    """Return how a program ended and the last lines of its log."""
    return f"{child.name} {child.how_it_ended()}; the last lines of {child.log}:\n{child.tail()}"


async def stop(child: Child, drain_seconds: float, log_folder: str = "") -> None:
    """Send SIGTERM and wait `drain_seconds`; then SIGTERM again, which ends a program at once, then SIGKILL.

    The log is deleted after exit status 0, unless `log_folder` asks to keep logs.
    """
    if child.has_ended():
        return
    steps = ((signal.SIGTERM, drain_seconds), (signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, KILL_SECONDS))
    for number, seconds in steps:
        if child.has_ended():
            break
        with suppress(ProcessLookupError):
            child.process.send_signal(number)
        deadline = asyncio.get_running_loop().time() + seconds
        while not child.has_ended() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
    if child.process.returncode == 0 and not log_folder:
        child.log.unlink(missing_ok=True)


def python(module: str, flags: Sequence[str]) -> list[str]:
    """Return the command line of one of bough's programs."""
    return [sys.executable, *exit_with_parent.MODULE, module, *flags]
