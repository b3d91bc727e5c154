"""The replica of the index, which other replicas ask where it is."""

from __future__ import annotations

from typing import Any

from bough.errors import Unavailable
from deploy.index import IndexPlace, IndexServer
from deploy.replicas import node_address
from deploy.settings import read_index


class IndexReplica:
    """The index and its address."""

    def __init__(self) -> None:
        self._server: IndexServer | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Start the index, or restart it with other settings."""
        settings = read_index(user_config)
        await self._stop()
        server = IndexServer(settings, node_address())
        await server.wait()
        self._server = server

    async def place(self) -> IndexPlace:
        """Return where the index is."""
        if self._server is None:
            raise Unavailable("the index is being started")
        return self._server.place

    async def check_health(self) -> None:
        """Raise where the server has ended or does not answer."""
        if self._server is not None:
            await self._server.check()

    async def __del__(self) -> None:
        """Stop the server, as the deployment ends or moves to another node."""
        await self._stop()

    async def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
