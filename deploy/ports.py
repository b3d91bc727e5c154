"""Fixed ports of this node, and whether they are free."""

from __future__ import annotations

import asyncio
import errno
import time

from bough.config.addresses import bound
from bough.errors import ConfigError

POLL_SECONDS = 0.1


async def until_free(host: str, port: int, patience_seconds: float) -> None:
    """Wait for what a replica that died has left at the port and drains.

    Other errors of the address are left to the program to report. Raise ConfigError if the port is in use still: that
    server would be taken for the program.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            bound(host, port).close()
            return
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                return
            if time.monotonic() >= deadline:
                raise ConfigError(f"program.port: must be free at {host}, got {port}, which is in use") from exc
        await asyncio.sleep(POLL_SECONDS)
