"""Where a process may listen: beyond its machine only with something that keeps strangers out."""

from __future__ import annotations

import logging

from bough.config.addresses import is_loopback
from bough.config.processes import OrchestratorConfig, ServiceConfig
from bough.errors import ConfigError

logger = logging.getLogger(__name__)


def guards_of(config: ServiceConfig) -> tuple[str, ...]:
    """Files by which strangers are kept out of a process, as far as there are any: of keys, and of authorities."""
    if isinstance(config, OrchestratorConfig):
        files = (config.keys, config.tls_client_ca)
    else:
        files = (config.worker_key_file, config.tls_ca)
    return tuple(file for file in files if file)


def require_guarded(config: ServiceConfig) -> None:
    """Tells what others could do who reach the process.

    Raises:
        ConfigError: they could use it, as nothing guards it, and the settings do not say that this is wanted.
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
                "which others reach; --insecure lets in whoever does"
            )
        logger.warning("--insecure: whoever reaches %s is let in", config.host)
    elif not config.tls_cert:
        logger.warning("without --tls-cert keys and texts cross the network to %s as they are", config.host)
