"""How a process comes to the workers of its bough, and what it asks of those that come to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType

import grpc

from bough.config.processes import KEY_FILE_VARIABLE, ServiceConfig
from bough.security.doorkeeper import Doorkeeper
from bough.security.worker_key import WorkerKey

NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Access:
    """Among processes of one bough; without a key they let everybody in."""

    key: WorkerKey | None = None

    @classmethod
    def of(cls, config: ServiceConfig, environ: Mapping[str, str] = NOTHING) -> Access:
        """By settings, or by the `environ` of a process that they are not all of.

        Raises:
            ConfigError: for a key that cannot be used.
        """
        file = config.worker_key_file or environ.get(KEY_FILE_VARIABLE, "")
        return cls(WorkerKey(file) if file else None)

    @property
    def credentials(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call to a worker."""
        return () if self.key is None else self.key.credentials

    @property
    def doorkeepers(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """Of a worker's server."""
        return [] if self.key is None else [Doorkeeper(self.key.require)]

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Follows the file of the key for as long as the block runs."""
        if self.key is None:
            yield
            return
        async with self.key.file.watched():
            yield


OPEN = Access()
