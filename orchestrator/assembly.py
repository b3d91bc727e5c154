"""Builds an orchestrator from its settings, for any program that embeds one.

It reads no command line, handles no signals and ends no process; a stop event ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from bough import __version__
from bough.config.addresses import advertised_host, bare, has_page, is_loopback, joined
from bough.config.processes import OrchestratorConfig
from bough.processes.process import (
    advertised,
    for_metrics,
    metrics_at,
    new_worker_id,
    unless_stopped,
    with_advertised_host,
)
from bough.registry.records import WorkerRecord
from bough.registry.registry import Registry, registered
from bough.rpc.server import Served
from bough.security.access import Access, metrics_context, require_guarded
from bough.security.keys import Keyring
from bough.security.tls import CurrentContext
from bough.telemetry.metrics import MetricsServer, metrics_url
from bough.telemetry.tracing import tracing
from orchestrator.cluster.directory import POLL_SECONDS, Directory
from orchestrator.service import serving_generation
from orchestrator.serving.requests import Requests
from orchestrator.serving.tenants import Callers
from orchestrator.telemetry.metrics import OrchestratorCollector

logger = logging.getLogger(__name__)

DRAINING = "this orchestrator is draining; ask another orchestrator"
ARRIVING_SECONDS = 0.3  # limit for reading requests that had reached a port when it closed


@dataclass(frozen=True, slots=True)
class Orchestrator:
    """The parts of a listening orchestrator. A further API needs only `callers`."""

    config: OrchestratorConfig
    worker_id: str
    registry: Registry
    directory: Directory
    requests: Requests
    served: Served  # the gRPC server
    callers: Callers
    metrics: MetricsServer

    @property
    def port(self) -> int:
        return self.served.port

    @property
    def is_ready(self) -> bool:
        """Whether a new request could be served."""
        return self.requests.is_ready

    @property
    def metrics_address(self) -> str:
        """host:port of /metrics; empty if not served."""
        return metrics_at(for_metrics(self.config), self.metrics.port)

    async def serve(self, stop: asyncio.Event) -> None:
        """Register the orchestrator in the index until `stop` is set, then drain it.

        It closes its ports at once, for a successor to listen there; the HTTP port closes when `stop` is set. Accepted
        requests of all APIs have `drain_seconds` to finish; further ones are refused as Unavailable.
        """
        address = advertised(self.config, self.port)
        record = WorkerRecord("orchestrator", self.worker_id, address, metrics=self.metrics_address)
        async with registered(self.registry, lambda: record):
            logger.info("bough %s: %s at %s", __version__, self.worker_id, record.address)
            while not stop.is_set():
                await self.served.set_ready(self.is_ready)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await stop.wait()
            await self.served.leave()
            self.served.close_port()
        await asyncio.gather(asyncio.to_thread(self.metrics.close), asyncio.sleep(ARRIVING_SECONDS))
        await self.requests.drain(DRAINING, self.config.drain_seconds)


@asynccontextmanager
async def assembled(config: OrchestratorConfig, stop: asyncio.Event) -> AsyncIterator[Orchestrator]:
    """Build an orchestrator in the running event loop. It listens within the block; afterwards everything is closed.

    Raises:
        StoppedAtStart: `stop` was set before the index answered.
        Unavailable: the index does not answer.
        ConfigError: a port is in use, the URL of the index or the file of keys cannot be read, no address to advertise
            was found, or the packages for traces are not installed.
    """
    require_guarded(config)
    keyring, access = Keyring(config.keys) if config.keys else None, Access.of(config)
    registry = Registry(config.index_url, config.namespace, config.session_idle_seconds)
    worker_id = new_worker_id("orchestrator")
    try:
        async with tracing(config, "orchestrator", worker_id, config.trace_sample) as tracer:
            await unless_stopped(stop, registry.wait())
            config = await with_advertised_host(config)
            directory = Directory(registry, access)
            requests = Requests(config, directory, worker_id)
            with closing(serve_metrics(config, requests)) as metrics:
                callers = Callers(requests, keyring, config.share_prefixes, access.key, tracer)
                async with (
                    directory.running(),
                    requests.running(),
                    callers.watching(),
                    access.watching(),
                    serving_generation(config, callers, access.api_credentials) as served,
                    serving_http(config, callers, metrics.registry, access.api_context, stop),
                ):
                    yield Orchestrator(config, worker_id, registry, directory, requests, served, callers, metrics)
    finally:
        await registry.close()


def serve_metrics(config: OrchestratorConfig, requests: Requests) -> MetricsServer:
    """Serve the metrics of requests at the configured port. Raises ConfigError if it is in use."""
    metrics = MetricsServer()
    metrics.registry.register(OrchestratorCollector(requests.figures))
    served = for_metrics(config)
    metrics.serve(served.host, config.metrics_port, metrics_context(config))
    requests.metrics_url = metrics_url(metrics_at(served, metrics.port))
    return metrics


@asynccontextmanager
async def serving_http(
    config: OrchestratorConfig,
    callers: Callers,
    figures: CollectorRegistry,
    tls: CurrentContext | None,
    leaving: asyncio.Event,
) -> AsyncIterator[None]:
    """Serve the OpenAI-compatible API during the block, with `figures` at /metrics; with `tls` by HTTPS only.

    Once `leaving` is set the port closes; running requests go on. Raises ConfigError if it is in use.
    """
    if config.http_port < 0:
        yield
        return
    # Imported only if needed, as HTTP libraries take long.
    from orchestrator.http_api.app import http_app
    from orchestrator.http_api.server import http_serving

    own_name = advertised_host(config) if is_loopback(config.host) and not config.keys else None
    has_open_figures = config.open_metrics
    app = http_app(callers, figures, has_open_figures=has_open_figures, has_page=has_page(config), own_name=own_name)
    async with http_serving(bare(config.host), config.http_port, app, tls, config.stalled_timeout, leaving) as port:
        callers.requests.http_url = f"{'http' if tls is None else 'https'}://{joined(advertised_host(config), port)}"
        logger.info("OpenAI's clients are served at %s/v1", callers.requests.http_url)
        yield
