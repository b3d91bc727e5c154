"""The benchmark of traces: its collector takes what is sent, its figures are there."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path

import grpc
import pytest

from bough.telemetry.otlp import OtlpTracer
from loadtest.tracing.__main__ import Sink, cpu_seconds, measured


async def test_its_collector_takes_spans() -> None:
    server, sink = grpc.aio.server(), Sink()
    server.add_generic_rpc_handlers((sink,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        tracer = OtlpTracer(f"http://127.0.0.1:{port}", "bough", "orchestrator", "o", 1.0)
        with tracer.serve("generate", ""):
            pass
        await asyncio.to_thread(tracer.close, 30.0)
        assert sink.num_bytes > 100
    finally:
        await server.stop(None)


def test_processor_time_is_that_of_the_process() -> None:
    before, began = cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() < began + 0.1:
        pass
    assert cpu_seconds(os.getpid()) - before >= 0.05, "it is told in steps of 0.01 s"


async def test_it_tells_what_traces_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.tracing.__main__.ANSWER_TOKENS", 8)
    flags = argparse.Namespace(requests=1, sweep_seconds=0.02, seed=1, settle_seconds=0.0)
    figures = await measured(flags, tmp_path)
    assert (figures["failed"], figures["unequal"], figures["requests"]) == (0, 0, 1)
    assert figures["cpu_ms_per_round"].keys() == {"off", "on", "away"}
    assert figures["on"]["tpot_ratio"]["geomean"] > 0
