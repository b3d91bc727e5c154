"""Traces of one process, sent to a collector in the test: events, refusals and dropped traces."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from bough.config.processes import DraftConfig, OrchestratorConfig, TargetConfig, parse
from bough.errors import ConfigError
from bough.processes.worker_process import run_worker
from bough.protocol.generation import Finished, GenerateOptions, Speculation, TextPrompt
from bough.rpc.services import TARGET
from bough.telemetry.tracing import NO_SPAN, NO_TRACER, Exporter, clock_offset_ns, tracing
from orchestrator.assembly import assembled
from orchestrator.serving.tenants import Callers
from tests.fakes.collector import collecting
from tests.fakes.fleet import FakeDraft, Fleet
from tests.fakes.streams import kill_the_one_that_gets
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def tracer_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exporter]]:
    """Tracers of this process, closed with the test."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    tracers: list[Exporter] = []
    yield tracers
    for exporter in tracers:
        exporter.close(1.0)


async def test_a_lost_target_is_an_event(fakes: Fleet, tracer_of: list[Exporter]) -> None:
    targets = [await fakes.target(name) for name in ("t0", "t1")]
    requests, _ = await fakes.orchestrator("--failover-timeout", "20", num_targets=2)
    kill_the_one_that_gets(3, targets)
    async with collecting() as collector:
        tracer_of.append(exporter := Exporter(collector.endpoint, "bough", "orchestrator", "o", 1.0))
        tenant = Callers(requests, tracer=exporter.tracer).tenant([])
        options = GenerateOptions(request_id="r", max_tokens=8, temperature=0.0)
        events = [event async for event in tenant.generate(TextPrompt("hello"), options)]
        assert isinstance(events[-1], Finished)
        assert events[-1].num_failovers == 1
        await until(lambda: any(span.name == "generate" for span in collector.spans))
        spans = collector.spans
        ((name, told),) = [event for span in spans for event in span.events]
        assert name == "failover"
        assert {told["bough.from"], told["bough.to"]} == {"t0", "t1"}
        assert told["error.type"] == "NoAnswer"
        assert any(span.is_error and span.attributes["error.type"] == "NoAnswer" for span in spans)
        (root,) = [span for span in spans if span.name == "generate"]
        assert root.attributes["bough.failovers"] == 1
        assert not root.is_error


async def test_a_failed_draft_worker_is_an_event(fakes: Fleet, tracer_of: list[Exporter]) -> None:
    await fakes.target("t")
    draft = FakeDraft("d", fakes.tokenizer)
    process = await fakes.worker(draft)
    requests, _ = await fakes.orchestrator("--draft", "workers")
    await until(lambda: len(requests.directory.statuses()) == 2)
    await process.kill()
    async with collecting() as collector:
        tracer_of.append(exporter := Exporter(collector.endpoint, "bough", "orchestrator", "o", 1.0))
        options = GenerateOptions(max_tokens=4, temperature=0.0, speculation=Speculation(budget=4, width=1, depth=2))
        events = Callers(requests, tracer=exporter.tracer).tenant([]).generate(TextPrompt("hello"), options)
        assert [event async for event in events]
        await until(lambda: any(span.name == "generate" for span in collector.spans))
        (first, *_) = [event for span in collector.spans for event in span.events]
        assert first == ("degraded", {"bough.worker": "d", "error.type": "NoAnswer"})


async def test_an_abandoned_request_is_no_error(fakes: Fleet, tracer_of: list[Exporter]) -> None:
    await fakes.target("t")
    requests, _ = await fakes.orchestrator()
    async with collecting() as collector:
        tracer_of.append(exporter := Exporter(collector.endpoint, "bough", "orchestrator", "o", 1.0))
        events = Callers(requests, tracer=exporter.tracer).tenant([]).generate(TextPrompt("hello"), GenerateOptions())
        await anext(events)
        await events.aclose()
        await until(lambda: any(span.name == "generate" for span in collector.spans))
        (root,) = [span for span in collector.spans if span.name == "generate"]
        assert (root.attributes["bough.cancelled"], root.is_error) == (True, False)


async def test_an_unreachable_collector_costs_a_log_line_and_no_time(
    fakes: Fleet, tracer_of: list[Exporter], caplog: pytest.LogCaptureFixture
) -> None:
    await fakes.target("t")
    requests, _ = await fakes.orchestrator()
    exporter = Exporter("http://127.0.0.1:1", "bough", "orchestrator", "o", 1.0)
    tenant = Callers(requests, tracer=exporter.tracer).tenant([])
    for number in range(30):
        options = GenerateOptions(request_id=f"r{number}", max_tokens=8, temperature=0.0)
        assert [event async for event in tenant.generate(TextPrompt("hello"), options)]
    began = time.monotonic()
    await asyncio.to_thread(exporter.close, 0.5)
    assert time.monotonic() - began < 10
    assert len([record for record in caplog.records if record.name.startswith("opentelemetry.")]) <= 2


async def test_the_last_spans_are_sent_when_a_process_ends() -> None:
    async with collecting() as collector:
        exporter = Exporter(collector.endpoint, "bough", "orchestrator", "o", 1.0)  # sends every five seconds
        with exporter.tracer.serve("generate", ""):
            pass
        await asyncio.to_thread(exporter.close, 30.0)
        assert [span.name for span in collector.spans] == ["generate"]


def test_the_clocks_offset_is_stable() -> None:
    offsets = [clock_offset_ns() for _ in range(20)]
    assert max(offsets) - min(offsets) < 1_000_000


async def test_without_tracing_opentelemetry_is_not_imported() -> None:
    """Neither imported nor made: if a process does not trace, one span that does nothing serves all requests."""
    config = parse(OrchestratorConfig, "orchestrator", [], {})
    async with tracing(config, "orchestrator", "o") as tracer:
        assert tracer is NO_TRACER
    with NO_TRACER.serve("x", CALLER) as span:
        assert span is span.child("y") is span.call("z", "") is NO_SPAN
        assert span.metadata == ()
    code = "import sys, orchestrator.__main__, target_worker.service, draft_worker.service; "
    code += "print({'opentelemetry.sdk.trace', 'opentelemetry.exporter'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


async def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    flags, stop = ["--otlp-endpoint", "http://h:1"], asyncio.Event()
    starts = [assembled(parse(OrchestratorConfig, "o", flags, {}), stop).__aenter__()]
    for kind in (TargetConfig, DraftConfig):
        config = parse(kind, "w", [*flags, "--model", "m"], {})
        starts.append(run_worker(config, "w", "w", TARGET, Mock(), Mock(), stop))
    for start in starts:
        with pytest.raises(ConfigError, match=r"--otlp-endpoint: must be empty if .*pip install '\.\[tracing\]'"):
            await start


@pytest.mark.parametrize(
    "endpoint",
    [
        "localhost:4317",
        "grpc://h:1",
        "http://",
        "http://h:x",
        "http://h/v1/traces",
        "http://me:pw@h:1",
        "http://h:99999",
    ],
)
def test_an_invalid_endpoint_is_refused_by_name(endpoint: str) -> None:
    wanted = "must be http://HOST:PORT or https://HOST:PORT"
    with pytest.raises(ConfigError, match=f"--otlp-endpoint: .*{wanted}"):
        parse(TargetConfig, "target_worker", ["--model", "m", "--otlp-endpoint", endpoint], {})
    with pytest.raises(ConfigError, match=f"OTEL_EXPORTER_OTLP_ENDPOINT: .*{wanted}"):
        parse(TargetConfig, "target_worker", ["--model", "m"], {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "must be grpc, or not set, got 'http/protobuf'"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "OTEL_.*zip"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "OTEL_.*soon"),
    ],
)
async def test_settings_that_opentelemetry_would_not_accept_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.setenv(name, text)
    config = parse(OrchestratorConfig, "orchestrator", ["--otlp-endpoint", "http://127.0.0.1:1"], {})
    with pytest.raises(ConfigError, match=message):
        async with tracing(config, "orchestrator", "o"):
            pass


def test_the_endpoint_is_opentelemetrys_own_variable() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
    assert parse(OrchestratorConfig, "orchestrator", [], environ).otlp_endpoint == "http://collector:4317"
    assert parse(OrchestratorConfig, "orchestrator", ["--otlp-endpoint", ""], environ).otlp_endpoint == ""


async def test_a_share_of_requests_is_traced(tracer_of: list[Exporter]) -> None:
    """Of those whose callers have not decided it; workers begin no trace of their own."""
    async with collecting() as collector:
        for share, kind in ((0.0, "target-worker"), (0.25, "orchestrator")):
            tracer_of.append(exporter := Exporter(collector.endpoint, "bough", kind, "x", share))
            num_traced = sum(exporter.tracer.serve("generate", "").is_recorded for _ in range(1000))
            # The chance of this to fail is below 1e-9.
            assert abs(num_traced - 1000 * share) <= (0 if share == 0 else 90)
            assert exporter.tracer.serve("generate", CALLER).is_recorded
            assert exporter.tracer.serve("generate", CALLER[:-2] + "00") is NO_SPAN


@pytest.mark.parametrize("share", ["-0.1", "1.5", "half"])
def test_an_invalid_share_is_refused_by_name(share: str) -> None:
    with pytest.raises(ConfigError, match="--trace-sample"):
        parse(OrchestratorConfig, "orchestrator", ["--trace-sample", share], {})
