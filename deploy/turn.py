"""Programs of one place take turns: what a replica that died has left behind may go on for as long as it drains."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bough.errors import ConfigError
from deploy.child import FOLDER_NAME

POLL_SECONDS = 0.1
GPUS = "CUDA_VISIBLE_DEVICES"  # which Ray sets in a replica that has asked for some


@asynccontextmanager
async def turn(module: str, fixed_address: str, patience_seconds: float) -> AsyncIterator[int]:
    """Waits until no earlier program has the same address, where that is fixed, or the same GPUs.

    Gives a descriptor to pass to the program that is started then.

    The file behind it is locked for as long as anybody has it: the program, once this block has ended.

    Raises:
        ConfigError: the earlier one does not end in time.
    """
    gpus = os.environ.get(GPUS, "")
    place = fixed_address or (f"GPU {gpus}" if gpus else f"process {os.getpid()}")
    folder = Path(tempfile.gettempdir()) / FOLDER_NAME
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]", "-", f"{module}-{place}.lock")
    descriptor = os.open(folder / name, os.O_CREAT | os.O_RDWR, 0o600)
    deadline = time.monotonic() + patience_seconds
    try:
        while not _taken(descriptor):
            if time.monotonic() > deadline:
                raise ConfigError(f"an earlier {module} has {place}, and must end first: it has not")
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
