"""Free ports of this node."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from contextlib import suppress

from bough.errors import ConfigError

POLL_SECONDS = 0.1


def free_port(host: str) -> int:
    """Return a port that nothing listens on at this host, which may be an IPv6 address."""
    with _bound(host, 0) as probe:
        return int(probe.getsockname()[1])


def require_free_port(host: str, port: int) -> None:
    """Raise ConfigError if the port is in use: that server would be taken for the program.

    Other errors of the address are left to the program to report.
    """
    try:
        _bound(host, port).close()
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


def _bound(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen; lingering connections of an earlier program do not matter."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    probe = socket.socket(family, kind, protocol)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
    except OSError:
        probe.close()
        raise
    return probe
