"""Opens the HTTP API besides gRPC, if configured."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from bough.config.addresses import advertised_host, bare, is_loopback, joined
from bough.config.processes import OrchestratorConfig
from bough.security.tls import CurrentContext
from orchestrator.serving.tenants import Callers

logger = logging.getLogger(__name__)


def has_page(config: OrchestratorConfig) -> bool:
    """Whether /ui is served; by default only if other machines cannot reach it."""
    return config.ui == "yes" or (config.ui == "auto" and is_loopback(config.host))


@asynccontextmanager
async def serving_http(
    config: OrchestratorConfig,
    callers: Callers,
    figures: CollectorRegistry,
    tls: CurrentContext | None,
    leaving: asyncio.Event,
) -> AsyncIterator[None]:
    """Serve the OpenAI-compatible API during the block, with `figures` at /metrics; with `tls` by HTTPS only.

    Once `leaving` is set the port is given up; what is being answered goes on.

    Raises:
        ConfigError: the port is in use.
    """
    if config.http_port < 0:
        yield
        return
    # Imported only if needed, as HTTP libraries take long.
    from orchestrator.http_api.app import http_app
    from orchestrator.http_api.server import http_serving

    own_name = advertised_host(config) if is_loopback(config.host) and not config.keys else None
    app = http_app(
        callers,
        figures,
        config.stalled_timeout,
        has_open_figures=config.open_metrics,
        has_page=has_page(config),
        own_name=own_name,
    )
    async with http_serving(bare(config.host), config.http_port, app, tls, config.stalled_timeout, leaving) as port:
        callers.requests.http_url = f"{'http' if tls is None else 'https'}://{joined(advertised_host(config), port)}"
        logger.info("OpenAI's clients are served at %s/v1", callers.requests.http_url)
        yield
