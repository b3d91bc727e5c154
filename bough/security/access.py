"""How a process comes to the workers of its bough, and what it asks of those that come to it."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import grpc

from bough.config.processes import OrchestratorConfig, ServiceConfig
from bough.errors import ConfigError
from bough.security.certificates import AUTHORITY, CERT, CLIENT_AUTHORITY, CertificateFiles, Certificates
from bough.security.doorkeeper import Doorkeeper
from bough.security.peer_names import PeerNames
from bough.security.tls import CurrentContext, PeerChannel, Tls, context_to_itself, server_context
from bough.security.worker_key import WorkerKey


@dataclass(frozen=True, slots=True)
class Access:
    """Among processes of one bough; without a key and an authority they let everybody in."""

    key: WorkerKey | None = None
    tls: Tls | None = None  # of this process's own servers; of its calls to workers where it has an authority
    peer_names: tuple[str, ...] = ()  # that clients of a worker may have; all of its authority's where empty

    @classmethod
    def of(cls, config: ServiceConfig) -> Access:
        """Raises ConfigError for a key or a certificate that cannot be used."""
        key = WorkerKey(config.worker_key_file) if config.worker_key_file else None
        files = certificate_files(config)
        return cls(key, Tls(files, is_server=True) if files else None, config.tls_peer_names)

    @property
    def credentials(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call to a worker."""
        return () if self.key is None else self.key.credentials

    @property
    def doorkeepers(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """Of a worker's server."""
        keepers: list[grpc.aio.ServerInterceptor] = [] if self.key is None else [Doorkeeper(self.key.require)]
        return [*keepers, PeerNames(frozenset(self.peer_names))] if self.peer_names else keepers

    @property
    def worker_credentials(self) -> grpc.ServerCredentials | None:
        """Of a worker's server: it lets in who has a certificate of the authority. None is no TLS."""
        return None if self.tls is None else self.tls.server_credentials(lambda now: now.authority)

    @property
    def worker_context(self) -> CurrentContext | None:
        """As `worker_credentials`, for what does not speak gRPC."""
        return None if self.tls is None else server_context(self.tls, lambda now: now.authority)

    @property
    def door_credentials(self) -> grpc.ServerCredentials | None:
        """Of an orchestrator's door for gRPC. None is no TLS."""
        return None if self.tls is None else self.tls.server_credentials(_clients_of_doors)

    @property
    def door_context(self) -> CurrentContext | None:
        """Of an orchestrator's door for HTTP. None is no TLS."""
        return None if self.tls is None else server_context(self.tls, _clients_of_doors)

    @property
    def own_context(self) -> CurrentContext | None:
        """For HTTP to the process itself that has these settings. None is no TLS."""
        return None if self.tls is None else context_to_itself(self.tls)

    def channel(self, address: str) -> PeerChannel:
        """To a worker of this bough: over TLS where there is an authority for it."""
        return PeerChannel(address, self.tls if self.tls is not None and self.tls.files.authority else None)

    def own_channel(self, address: str) -> PeerChannel:
        """To the process itself that has these settings, for who looks after it."""
        return PeerChannel(address, self.tls, is_to_itself=True)

    def refresh(self) -> None:
        """Reads again what has changed: for who looks now and then, and follows nothing. It waits for the disk."""
        if self.key is not None:
            self.key.file.refresh()
        if self.tls is not None:
            self.tls.refresh()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Follows the files for as long as the block runs."""
        async with AsyncExitStack() as stack:
            if self.key is not None:
                await stack.enter_async_context(self.key.file.watched())
            if self.tls is not None:
                await stack.enter_async_context(self.tls.watched())
            yield


OPEN = Access()


def metrics_context(config: ServiceConfig) -> Callable[[], ssl.SSLContext] | None:
    """For a server in threads of its own, which looks at the files at each connection. None is no TLS."""
    if not (files := certificate_files(config)):
        return None
    tls = Tls(replace(files, authority="", client_authority=""), is_server=True, is_told=False)
    context = server_context(tls, lambda _: b"")

    def now() -> ssl.SSLContext:
        tls.refresh()
        return context()

    return now


def certificate_files(config: ServiceConfig) -> CertificateFiles:
    """Those that the settings name. Raises ConfigError where one is missing beside another."""
    clients = config.tls_client_ca if isinstance(config, OrchestratorConfig) else ""
    files = CertificateFiles(config.tls_cert, config.tls_key, config.tls_ca, clients)
    for setting, value in ((AUTHORITY, files.authority), (CLIENT_AUTHORITY, files.client_authority)):
        if value and not (files.cert or files.key):
            raise ConfigError(f"{CERT}: missing; must be given where {setting} is, as the process has to show one, too")
    is_worker = not isinstance(config, OrchestratorConfig)
    if is_worker and (files.cert or files.key or config.tls_peer_names) and not files.authority:
        raise ConfigError(
            f"{AUTHORITY}: missing; must be given for a worker with {CERT}, which answers certificates of it"
        )
    return files


def _clients_of_doors(now: Certificates) -> bytes:
    """Who must show a certificate at a door may also be one of the bough's own processes, who watch over it: with one
    of their authority, or of the process itself where they have none.
    """
    return now.client_authority and now.client_authority + b"\n" + (now.authority or now.chain)
