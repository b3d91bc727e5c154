"""Programs of one GPU take turns: what a replica that died has left behind may go on for as long as it drains."""

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
GPUS = "CUDA_VISIBLE_DEVICES"  # which Ray sets in a replica that has asked for some


@asynccontextmanager
async def turn(module: str, patience_seconds: float) -> AsyncIterator[int]:
    """Waits, as long as it may, until no earlier program has the GPUs of this replica.

    Gives a descriptor to pass to the program that is started then: the file behind it is locked for as long as anybody
    has it. Programs that share a GPU on purpose are waited for in vain, and the next one starts beside them.
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
