"""Fixed ports of this node, and whether they are free."""

from __future__ import annotations

import asyncio
import errno
import time
from contextlib import suppress

from bough.config.addresses import bound
from bough.errors import ConfigError

POLL_SECONDS = 0.1


def require_free_port(host: str, port: int) -> None:
    """Raise ConfigError if the port is in use: that server would be taken for the program.

    Other errors of the address are left to the program to report.
    """
    try:
        bound(host, port).close()
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(f"program.port: must be free at {host}, got {port}, which is in use") from exc


async def until_free(host: str, port: int, patience_seconds: float) -> None:
    """Waits for what a replica that died has left there and drains. Raises ConfigError as `require_free_port`."""
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        with suppress(ConfigError):
            require_free_port(host, port)
            return
        await asyncio.sleep(POLL_SECONDS)
    require_free_port(host, port)
