"""Where a process may listen: beyond its machine only with something that keeps strangers out."""

from __future__ import annotations

import logging

from bough.config.addresses import is_loopback
from bough.config.processes import OrchestratorConfig, ServiceConfig
from bough.errors import ConfigError

logger = logging.getLogger(__name__)


def require_guarded(config: ServiceConfig) -> None:
    """Tells what others could do who reach the process.

    Raises:
        ConfigError: they could use it, as nothing guards it, and the settings do not say that this is wanted.
    """
    if is_loopback(config.host):
        return
    if isinstance(config, OrchestratorConfig):
        guards, settings = (config.keys, config.tls_client_ca), "--keys FILE or --tls-client-ca FILE"
    else:
        guards, settings = (config.worker_key_file, config.tls_ca), "--worker-key-file FILE or --tls-ca FILE"
    if not any(guards):
        if not config.insecure:
            raise ConfigError(
                f"--host: must be this machine's own, such as 127.0.0.1, without {settings}, got {config.host!r}, "
                "which others reach; --insecure lets in whoever does"
            )
        logger.warning("--insecure: whoever reaches %s is let in", config.host)
    elif not config.tls_cert:
        logger.warning("without --tls-cert keys and texts cross the network to %s as they are", config.host)
