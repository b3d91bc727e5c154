"""Tracing of a process: off unless an endpoint is configured; then by OpenTelemetry."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bough.config.processes import ServiceConfig
from bough.errors import ConfigError
from bough.telemetry.spans import NO_TRACER, Tracer

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_PROTOCOL"
FLUSH_SECONDS = 2.0  # for which the end of a process waits for the last export


@asynccontextmanager
async def tracing(config: ServiceConfig, kind: str, process_id: str, sample: float = 0.0) -> AsyncIterator[Tracer]:
    """The tracer of a process during the block.

    `sample` is the share of requests traced, among those whose callers have not decided.

    Raises:
        ConfigError: tracing is configured but its packages are not installed, or OpenTelemetry's environment variables
            are invalid.
    """
    if not config.otlp_endpoint:
        yield NO_TRACER
        return
    if (protocol := os.environ.get(PROTOCOL_VARIABLE, "")) not in ("", "grpc"):
        raise ConfigError(f"{PROTOCOL_VARIABLE}: must be grpc, or not set, got {protocol!r}")
    try:  # imported only if needed
        from bough.telemetry.otlp import OtlpTracer
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--otlp-endpoint: must be empty where {exc.name} is not installed, got {config.otlp_endpoint!r}; "
            "pip install '.[tracing]'"
        ) from exc
    try:
        tracer = OtlpTracer(config.otlp_endpoint, config.namespace, kind, process_id, sample)
    except Exception as exc:  # invalid variables such as OTEL_EXPORTER_OTLP_TIMEOUT raise various errors
        raise ConfigError(f"OTEL_*: must be as OpenTelemetry documents them, got an error: {exc}") from exc
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close, FLUSH_SECONDS)
