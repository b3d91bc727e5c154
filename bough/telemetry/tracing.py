"""Traces of a process, by its settings: off unless an endpoint is named, and then OpenTelemetry's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bough.config.processes import ServiceConfig
from bough.errors import ConfigError
from bough.telemetry.spans import NO_TRACER, Tracer

FLUSH_SECONDS = 2.0  # that the end of a process waits for a collector to take the last spans


@asynccontextmanager
async def tracing(config: ServiceConfig, kind: str, process_id: str, sample: float = 0.0) -> AsyncIterator[Tracer]:
    """What a process of this kind and name traces with, for as long as the block runs.

    `sample` is the share of requests that are traced of those whose callers have not decided it.

    Raises:
        ConfigError: traces are asked for, and the packages for them are not installed.
    """
    if not config.otlp_endpoint:
        yield NO_TRACER
        return
    try:  # OpenTelemetry is imported only where it is asked for
        from bough.telemetry.otlp import OtlpTracer
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--otlp-endpoint: value was {config.otlp_endpoint!r}; must be empty where {exc.name} is not installed: "
            "pip install 'bough[tracing]'"
        ) from exc
    tracer = OtlpTracer(config.otlp_endpoint, config.namespace, kind, process_id, sample)
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close, FLUSH_SECONDS)
