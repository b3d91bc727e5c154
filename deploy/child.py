"""Start and stop a replica's program, and lock its GPUs: one whose replica died may hold them until it has drained."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bough.concurrency.tasks import came_true
from bough.errors import ConfigError
from bough.processes.child import Child, drain, end, open_child

logger = logging.getLogger(__name__)

GPUS = "CUDA_VISIBLE_DEVICES"  # set by Ray in replicas that ask for GPUs


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
    folder = Path(log_folder) if log_folder else temporary_folder()
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


def temporary_folder() -> Path:
    """Return the folder for logs and locks, which is made where it is not there. Raise ConfigError if it is another's.

    Its name can be guessed, and whoever made it could replace what is written there.
    """
    folder = Path(tempfile.gettempdir()) / f"bough-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or (owner := folder.stat().st_uid) != os.getuid():
        found = "a link" if folder.is_symlink() else f"that of user {owner}"
        raise ConfigError(f"{folder}: must be this user's own folder (TMPDIR names another place), got {found}")
    return folder


async def stop(child: Child, drain_seconds: float, log_folder: str = "") -> None:
    """Let a program drain for `drain_seconds`, and end it (see `end`).

    The log is deleted after exit status 0, unless `log_folder` asks to keep logs.
    """
    if child.has_ended():
        return
    await drain([child], drain_seconds)
    await asyncio.to_thread(end, [child], 0.0)
    if child.process.returncode == 0 and not log_folder:
        child.log.unlink(missing_ok=True)


@asynccontextmanager
async def gpu_lock(module: str, gpus: str, timeout_seconds: float) -> AsyncIterator[int]:
    """Wait until no earlier program has these GPUs, as in GPUS, or until `timeout_seconds` have passed; "" are none.

    Yields a file descriptor for the program to inherit: the lock is held while any process has it open. After the
    wait the program starts beside the earlier one, with a warning, as several programs may share a GPU on purpose.
    """
    folder = temporary_folder()
    name = re.sub(r"[^\w.-]", "-", f"{module}-GPU-{gpus}.lock")
    descriptor = os.open(folder / name if gpus else os.devnull, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        if gpus and not _taken(descriptor):
            logger.info("waiting for an earlier %s to leave GPU %s, %g s at most", module, gpus, timeout_seconds)
            if not await came_true(lambda: _taken(descriptor), timeout_seconds):
                logger.warning("an earlier %s still has GPU %s: another one is started beside it", module, gpus)
        yield descriptor
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
