"""A lock on a replica's GPUs: a program whose replica died may hold them until it has drained."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from deploy.child import FOLDER_NAME

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
GPUS = "CUDA_VISIBLE_DEVICES"  # set by Ray in replicas that ask for GPUs


@asynccontextmanager
async def gpu_lock(module: str, patience_seconds: float) -> AsyncIterator[int]:
    """Wait until no earlier program has the GPUs of this replica, or until `patience_seconds` have passed.

    Yields a file descriptor for the program to inherit: the lock is held while any process has it open. After the
    wait the program starts beside the earlier one, with a warning, as several programs may share a GPU on purpose.
    """
    gpus = os.environ.get(GPUS, "")
    folder = Path(tempfile.gettempdir()) / FOLDER_NAME
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]", "-", f"{module}-GPU-{gpus}.lock")
    descriptor = os.open(folder / name if gpus else os.devnull, os.O_CREAT | os.O_RDWR, 0o600)
    deadline = time.monotonic() + patience_seconds
    try:
        while gpus and not _taken(descriptor):
            if time.monotonic() > deadline:
                logger.warning("an earlier %s still has GPU %s: another one is started beside it", module, gpus)
                break
            await asyncio.sleep(POLL_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
