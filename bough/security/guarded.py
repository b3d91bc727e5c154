"""Refuses to listen beyond this machine without a guard against strangers."""

from __future__ import annotations

import logging

from bough.config.addresses import is_loopback
from bough.config.processes import OrchestratorConfig, ServiceConfig
from bough.errors import ConfigError

logger = logging.getLogger(__name__)


def guards_of(config: ServiceConfig) -> tuple[str, ...]:
    """Files of keys and authorities that guard a process."""
    if isinstance(config, OrchestratorConfig):
        files = (config.keys, config.tls_client_ca)
    else:
        files = (config.worker_key_file, config.tls_ca)
    return tuple(file for file in files if file)


def require_guarded(config: ServiceConfig) -> None:
    """Check the listening address, and warn about what others could do.

    Raises:
        ConfigError: others reach the process, nothing guards it, and --insecure is not set.
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
