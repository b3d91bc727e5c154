"""Credentials for calls among the processes of a deployment, checks of callers, and the demand for a guard."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace

import grpc

from bough.config.addresses import is_loopback
from bough.config.processes import OrchestratorConfig, ServiceConfig
from bough.errors import ConfigError
from bough.security.auth_interceptor import AuthInterceptor, PeerNames
from bough.security.certificates import AUTHORITY, CERT, CLIENT_AUTHORITY, CertificateFiles, Certificates
from bough.security.keys import WorkerKey
from bough.security.tls import CurrentContext, PeerChannel, Tls, context_to_itself, server_context

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials of a process; without key and authority everybody is admitted."""

    key: WorkerKey | None = None
    tls: Tls | None = None  # for this process's servers; for its calls to workers if there is an authority
    peer_names: tuple[str, ...] = ()  # allowed for a worker's clients; empty admits every certificate of the authority

    @classmethod
    def of(cls, config: ServiceConfig) -> Access:
        """Raises ConfigError for an unusable key or certificate."""
        key = WorkerKey(config.worker_key_file) if config.worker_key_file else None
        files = certificate_files(config)
        return cls(key, Tls(files, is_server=True) if files else None, config.tls_peer_names)

    @property
    def credentials(self) -> tuple[tuple[str, str], ...]:
        """Metadata of calls to workers."""
        return () if self.key is None else self.key.credentials

    @property
    def auth_interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """Interceptors of a worker's server."""
        keepers: list[grpc.aio.ServerInterceptor] = [] if self.key is None else [AuthInterceptor(self.key.require)]
        return [*keepers, PeerNames(frozenset(self.peer_names))] if self.peer_names else keepers

    @property
    def worker_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials of a worker's server, which requires certificates of the authority; None without TLS."""
        return None if self.tls is None else self.tls.server_credentials(lambda now: now.authority)

    @property
    def worker_context(self) -> CurrentContext | None:
        """TLS context of a worker's server that does not speak gRPC; None without TLS."""
        return None if self.tls is None else server_context(self.tls, lambda now: now.authority)

    @property
    def api_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials of an orchestrator's gRPC server; None without TLS."""
        return None if self.tls is None else self.tls.server_credentials(_clients_of_apis)

    @property
    def api_context(self) -> CurrentContext | None:
        """TLS context of an orchestrator's HTTP server; None without TLS."""
        return None if self.tls is None else server_context(self.tls, _clients_of_apis)

    @property
    def own_context(self) -> CurrentContext | None:
        """TLS context for HTTP to the process with these settings itself; None without TLS."""
        return None if self.tls is None else context_to_itself(self.tls)

    def channel(self, address: str) -> PeerChannel:
        """A channel to a worker, with TLS if there is an authority."""
        return PeerChannel(address, self.tls if self.tls is not None and self.tls.files.authority else None)

    def own_channel(self, address: str) -> PeerChannel:
        """A channel to the process with these settings itself, for its supervisor."""
        return PeerChannel(address, self.tls, is_to_itself=True)

    def refresh(self) -> None:
        """Reload changed files, for callers that do not use `watching`; blocks on the disk."""
        if self.key is not None:
            self.key.file.refresh()
        if self.tls is not None:
            self.tls.refresh()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the files during the block."""
        key = nullcontext() if self.key is None else self.key.file.watched()
        async with key, nullcontext() if self.tls is None else self.tls.watched():
            yield


OPEN = Access()
END = b"-----END CERTIFICATE-----\n"


def metrics_context(config: ServiceConfig) -> Callable[[], ssl.SSLContext] | None:
    """TLS contexts for a metrics server in its own threads, which reloads files at each connection; None if no TLS."""
    if not (files := certificate_files(config)):
        return None
    tls = Tls(replace(files, authority="", client_authority=""), is_server=True, is_logged=False)
    context = server_context(tls, lambda _: b"")

    def now() -> ssl.SSLContext:
        tls.refresh()
        return context()

    return now


def certificate_files(config: ServiceConfig) -> CertificateFiles:
    """The files that the settings name. Raises ConfigError if one is missing."""
    clients = config.tls_client_ca if isinstance(config, OrchestratorConfig) else ""
    files = CertificateFiles(config.tls_cert, config.tls_key, config.tls_ca, clients)
    for setting, value in ((AUTHORITY, files.authority), (CLIENT_AUTHORITY, files.client_authority)):
        if value and not (files.cert or files.key):
            raise ConfigError(f"{CERT}: missing; must be given if {setting} is, as the process must present one too")
    is_worker = not isinstance(config, OrchestratorConfig)
    if is_worker and (files.cert or files.key or config.tls_peer_names) and not files.authority:
        raise ConfigError(
            f"{AUTHORITY}: missing; must be given for a worker with {CERT}, which accepts only certificates of it"
        )
    return files


def _clients_of_apis(now: Certificates) -> bytes:
    """Authorities whose certificates an API accepts, including the supervisor's, as it calls the APIs too.

    Without an authority of the processes, the supervisor's is the process's own certificate. Authorities that follow it
    in its file are left out, as they sign other certificates too.
    """
    own = now.chain.partition(END)[0] + END
    return now.client_authority and now.client_authority + b"\n" + (now.authority or own)


def guards_of(config: ServiceConfig) -> tuple[str, ...]:
    """Files of keys and authorities that guard a process."""
    if isinstance(config, OrchestratorConfig):
        files = (config.keys, config.tls_client_ca)
    else:
        files = (config.worker_key_file, config.tls_ca)
    return tuple(file for file in files if file)


def require_guarded(config: ServiceConfig) -> None:
    """Check the listening address, and warn about unprotected access.

    Raises:
        ConfigError: other machines reach the process, nothing guards it, and --insecure is not set.
    """
    if is_loopback(config.host):
        return
    if not guards_of(config):
        if not config.insecure:
            is_orchestrator = isinstance(config, OrchestratorConfig)
            guards = ("--keys", "--tls-client-ca") if is_orchestrator else ("--worker-key-file", "--tls-ca")
            settings = " or ".join(f"{guard} FILE" for guard in guards)
            raise ConfigError(
                f"--host: must be this machine's own, such as 127.0.0.1, without {settings}, got {config.host!r}, "
                "which other machines reach; --insecure admits everyone who reaches it"
            )
        logger.warning("--insecure: everyone who reaches %s is admitted", config.host)
    elif not config.tls_cert:
        logger.warning("without --tls-cert keys and texts cross the network to %s unencrypted", config.host)
