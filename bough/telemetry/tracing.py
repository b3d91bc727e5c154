"""Traces of a process, by its settings: off unless an endpoint is named, and then OpenTelemetry's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from bough.config.processes import ServiceConfig
from bough.errors import ConfigError
from bough.telemetry.spans import NO_TRACER, Tracer

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_PROTOCOL"
FLUSH_SECONDS = 2.0  # that the end of a process waits for a collector to take the last spans


@asynccontextmanager
async def tracing(config: ServiceConfig, kind: str, process_id: str, sample: float = 0.0) -> AsyncIterator[Tracer]:
    """What a process of this kind and name traces with, for as long as the block runs.

    `sample` is the share of requests that are traced of those whose callers have not decided it.

    Raises:
        ConfigError: traces are asked for, and the packages for them are not installed, or what OpenTelemetry reads of
            the environment makes no sense.
    """
    if not config.otlp_endpoint:
        yield NO_TRACER
        return
    require_grpc(os.environ)
    try:  # OpenTelemetry is imported only where it is asked for
        from bough.telemetry.otlp import OtlpTracer
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--otlp-endpoint: value was {config.otlp_endpoint!r}; must be empty where {exc.name} is not installed: "
            "pip install 'bough[tracing]'"
        ) from exc
    try:
        tracer = OtlpTracer(config.otlp_endpoint, config.namespace, kind, process_id, sample)
    except Exception as exc:  # by whatever its own variables, such as OTEL_EXPORTER_OTLP_TIMEOUT, may raise
        raise ConfigError(f"OTEL_*: value was refused by OpenTelemetry ({exc}); must be as its documents say") from exc
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close, FLUSH_SECONDS)


def require_grpc(environ: Mapping[str, str]) -> None:
    """Raises ConfigError where OpenTelemetry is told to send in another way than over gRPC."""
    protocol = environ.get(PROTOCOL_VARIABLE, "")
    if protocol not in ("", "grpc"):
        raise ConfigError(f"{PROTOCOL_VARIABLE}: value was {protocol!r}; must be grpc, or not set")
