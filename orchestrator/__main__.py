"""`python -m orchestrator`: one orchestrator, until SIGTERM and what runs then has finished."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress

from bough import __version__
from bough.config import OrchestratorConfig, parse
from bough.gate import Gate
from bough.heartbeat import registered
from bough.metrics import MetricsServer
from bough.pb import generation_pb2, generation_pb2_grpc
from bough.process import advertised, configure_logging, new_worker_id, run, stop_event, unless_stopped
from bough.records import WorkerRecord
from bough.registry import Registry
from bough.rpc import Served, service_name, serving
from orchestrator.directory import POLL_SECONDS, Directory
from orchestrator.http_door import http_door
from orchestrator.metrics import OrchestratorCollector
from orchestrator.requests import Requests
from orchestrator.service import GenerationService

logger = logging.getLogger(__name__)


async def main() -> None:
    """Reads the settings and serves: SERVING while there is a target to ask; drains when told to stop."""
    config = parse(OrchestratorConfig, "orchestrator", sys.argv[1:], os.environ)
    configure_logging(config.log_level)
    stop = stop_event()
    registry = Registry(config.index_url, config.namespace, config.session_idle_seconds)
    worker_id = new_worker_id("orchestrator")
    await unless_stopped(stop, registry.wait())
    directory = Directory(registry)
    requests = Requests(config, directory, worker_id)
    metrics = serve_metrics(config, requests)
    service = GenerationService(requests)
    name = service_name(generation_pb2.DESCRIPTOR, "Generation")
    async with (
        directory.running(),
        requests.running(),
        serving(
            config.host,
            config.port,
            name,
            lambda server: generation_pb2_grpc.add_GenerationServicer_to_server(service, server),
            Gate("Generate"),
            config.stalled_timeout,
        ) as served,
        http_door(config, requests, metrics.registry),
    ):
        record = WorkerRecord("orchestrator", worker_id, advertised(config, served.port))
        async with registered(registry, lambda: record):
            logger.info("bough %s: %s at %s", __version__, worker_id, record.address)
            await _until(stop, served, directory)
            await served.leave()
        await _drain(served, requests, config.drain_seconds)
    await registry.close()
    metrics.close()


def serve_metrics(config: OrchestratorConfig, requests: Requests) -> MetricsServer:
    """What requests have come to, at the port that is set. Raises ConfigError where that is in use."""
    metrics = MetricsServer()
    metrics.registry.register(OrchestratorCollector(requests.figures))
    metrics.serve(config.host, config.metrics_port)
    if metrics.port >= 0:
        requests.metrics_url = f"http://{config.host}:{metrics.port}/metrics"
    return metrics


async def _drain(served: Served, requests: Requests, patience_seconds: float) -> None:
    """Who waits has lost nothing yet and is sent on; who runs may finish."""
    refusal = "this orchestrator is draining; another orchestrator would do"
    requests.admission.close(refusal)
    await served.drain(refusal, patience_seconds)


async def _until(stop: asyncio.Event, served: Served, directory: Directory) -> None:
    while not stop.is_set():
        await served.set_ready(directory.has_target)
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await stop.wait()


if __name__ == "__main__":
    run(main)
