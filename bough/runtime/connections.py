"""The limit of a server's open connections, and which one is closed for a new one."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import Protocol

MAX_CONNECTIONS = 4096


class Connection(Protocol):
    """An open connection of a server, which may be in its handshake."""

    @property
    def idle_since(self) -> float | None:
        """Event loop time since which the connection has been idle; None while it is busy."""

    def abort(self) -> None:
        """Close it at once."""


def connection_limit(num_descriptors: int) -> int:
    """Limit of open connections: at most one for `num_descriptors` that the process may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, limit // num_descriptors))
    )


def longest_idle(connections: Iterable[Connection]) -> Connection | None:
    """The connection to close for a new one; None if all are busy."""
    idle = [(since, number, each) for number, each in enumerate(connections) if (since := each.idle_since) is not None]
    return min(idle)[2] if idle else None
