"""Traces and logs of three real processes: one request is one trace of all, and has one name in all logs."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import grpc
import httpx
import pytest

from bough.client import Client
from bough.pb import generation_pb2 as pb
from bough.processes.launch import Cluster, Settings
from bough.rpc.services import GENERATION, stub_of
from orchestrator.telemetry.request_watch import hashed
from tests.conftest import pipeline
from tests.fakes.collector import CLIENT, SERVER, Collector, Seen, collecting
from tests.fakes.simulated import simulated_settings, write_profile
from tests.fakes.waiting import until

PROMPT = "the secret word is marzipan"
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID, CALLER_SPAN = CALLER.split("-")[1:3]
KEPT_TO_ITSELF = ("marzipan", "secret", "chat-of-anna")


@dataclass(frozen=True, slots=True)
class Traced:
    """Three processes that trace, and where they send it."""

    cluster: Cluster
    collector: Collector

    async def grpc(self, request_id: str, *metadata: tuple[str, str], **fields: object) -> list[pb.GenerateEvent]:
        """One request over gRPC; its rounds ask the draft, without which trees that size themselves may go here."""
        always = pb.Speculation(budget=8)
        request = pb.GenerateRequest(
            request_id=request_id, text=PROMPT, max_tokens=12, ignore_eos=True, speculation=always, **fields
        )
        async with grpc.aio.insecure_channel(self.cluster.address) as channel:
            call = stub_of(GENERATION, channel).Generate(request, metadata=metadata)
            return [event async for event in call]

    async def http(self) -> httpx.AsyncClient:
        """A client of the HTTP API."""
        async with Client(self.cluster.address) as client:
            return httpx.AsyncClient(base_url=(await client.server_info()).http_url, timeout=60)

    def log(self, name: str) -> list[dict[str, str]]:
        """The lines of a process's log, which are JSON all."""
        lines = self.cluster.children[name].log.read_text().splitlines()
        return [json.loads(line) for line in lines]


def traced(settings: Settings, endpoint: str) -> Settings:
    """The same processes, all of which trace and log as JSON what there is."""
    parts = {
        name: replace(getattr(settings, name), otlp_endpoint=endpoint, log_format="json", log_level="DEBUG")
        for name in ("target", "draft", "orchestrator")
    }
    return replace(settings, **parts)


@contextmanager
def quick_batches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield


@pytest.fixture(scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    profile = write_profile(tmp_path_factory.mktemp("profiles"))
    with quick_batches():
        async with (
            collecting() as collector,
            pipeline(traced(simulated_settings(profile, profile), collector.endpoint)) as cluster,
        ):
            yield Traced(cluster, collector)


def children(spans: list[Seen], of: Seen) -> list[Seen]:
    return sorted((span for span in spans if span.parent_id == of.span_id), key=lambda span: span.began_ns)


def names(spans: list[Seen]) -> list[str]:
    return [span.name for span in spans]


async def test_a_request_is_one_trace_of_three_services(stack: Traced) -> None:
    events = await stack.grpc("r-grpc", ("traceparent", CALLER), session_id="chat-of-anna")
    finished = events[-1].finished
    spans = await stack.collector.trace_of("r-grpc")
    assert {span.service for span in spans} == {"bough-orchestrator", "bough-draft-worker", "bough-target-worker"}
    assert {span.trace_id for span in spans} == {TRACE_ID}, "the caller's"
    (root,) = [span for span in spans if span.name == "generate"]
    assert (root.parent_id, root.kind) == (CALLER_SPAN, SERVER)
    assert root.attributes["gen_ai.usage.output_tokens"] == 12
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert root.attributes["bough.session"] == hashed("chat-of-anna")
    assert root.resource["service.namespace"] == "bough"
    of_request = children(spans, root)
    rounds = [span for span in of_request if span.name == "round"]
    assert names(of_request) == ["queue", "open", *["round"] * finished.speculation.num_rounds]
    assert sum(span.attributes["bough.tokens"] for span in rounds) == 12
    drafted = 0
    for span in rounds:
        parts = children(spans, span)
        assert names(parts)[-2:] == ["bough.v1.Target/Verify", "commit"]
        for call in parts[:-1]:
            (served,) = children(spans, call)
            assert (call.kind, served.kind, served.name) == (CLIENT, SERVER, call.name)
            of_worker = names(children(spans, served))
            if call.name == "bough.v1.Draft/Grow":
                drafted += 1
                assert of_worker == ["queue", *["draft step"] * (len(of_worker) - 1)]
            else:
                assert of_worker == ["queue", *["sweep"] * of_worker.count("sweep"), "verdict"]
                assert "sweep" in of_worker
    assert drafted > 0


async def test_spans_lie_within_their_parents(stack: Traced) -> None:
    await stack.grpc("r-nested")
    spans = await stack.collector.trace_of("r-nested")
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.began_ns <= span.ended_ns, span
        if parent := by_id.get(span.parent_id):
            assert parent.began_ns <= span.began_ns, (parent, span)
            assert span.ended_ns <= parent.ended_ns, (parent, span)
    roots = [span for span in spans if span.parent_id not in by_id]
    assert names(roots) == ["generate"], "all else is within the request"
    assert abs(roots[0].began_ns - time.time_ns()) < 600e9


async def test_scoring_a_prompt_is_in_the_trace(stack: Traced) -> None:
    """The target's work for them was in none. One without weights refuses it."""
    trace_id, verify, seen = TRACE_ID.replace("0af7", "6af7"), "bough.v1.Target/Verify", stack.collector
    with pytest.raises(grpc.aio.AioRpcError, match="simulated workers know no probabilities"):
        await stack.grpc("r-scored", ("traceparent", CALLER.replace("0af7", "6af7")), prompt_logprobs=0)
    await until(lambda: seen.named("generate", trace_id) and len(seen.named(verify, trace_id)) == 2)
    (root,), (score,) = seen.named("generate", trace_id), seen.named("score", trace_id)
    call, served = seen.named(verify, trace_id)
    assert (score.parent_id, call.parent_id, served.parent_id) == (root.span_id, score.span_id, call.span_id)
    assert served.service == "bough-target-worker"


async def test_sweeps_report_their_times(stack: Traced) -> None:
    await stack.grpc("r-sweeps")
    spans = await stack.collector.trace_of("r-sweeps")
    sweeps = [span for span in spans if span.name == "sweep"]
    assert sweeps
    for sweep in sweeps:
        told = sweep.attributes
        seconds = told["bough.sweep.wait_seconds"] + told["bough.sweep.compute_seconds"]
        assert seconds == pytest.approx((sweep.ended_ns - sweep.began_ns) / 1e9, rel=0.01)
        assert told["bough.sweep.rows"] >= 1
    steps = [span for span in spans if span.name == "draft step"]
    assert any(step.attributes["bough.step.expanded_nodes"] for step in steps)


async def test_over_http_the_trace_continues_the_callers(stack: Traced) -> None:
    """Each choice is a request of its own in it."""
    async with await stack.http() as client:
        headers = {"traceparent": CALLER.replace("0af7", "1af7"), "x-request-id": "http-7"}
        body = {"prompt": PROMPT, "max_tokens": 3, "n": 2, "ignore_eos": True}
        response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    trace_id = TRACE_ID.replace("0af7", "1af7")
    await until(lambda: len(stack.collector.named("generate", trace_id)) == 2)
    for root in stack.collector.named("generate", trace_id):
        assert root.parent_id == CALLER_SPAN
        assert root.attributes["bough.http_request_id"] == "http-7"
        assert root.attributes["gen_ai.request.id"].startswith(response.json()["id"])


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        "zz-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        "x" * 5000,
    ],
)
async def test_a_malformed_traceparent_is_ignored(stack: Traced, traceparent: str) -> None:
    request_id = f"r-malformed-{len(traceparent)}"
    assert (await stack.grpc(request_id, ("traceparent", traceparent)))[-1].HasField("finished")
    (root,) = [span for span in await stack.collector.trace_of(request_id) if span.name == "generate"]
    assert root.parent_id == ""


async def test_two_traceparents_are_ignored(stack: Traced) -> None:
    """Over HTTP; of gRPC's metadata only one comes through."""
    async with await stack.http() as client:
        headers = [("traceparent", CALLER.replace("0af7", other)) for other in ("4af7", "5af7")]
        body = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
        response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    name = response.json()["id"]
    told = stack.collector.spans
    await until(lambda: any(s.attributes.get("gen_ai.request.id", "").startswith(name) for s in told))
    assert not [span for span in told if span.trace_id[:4] in ("4af7", "5af7")]


async def test_requests_that_the_caller_does_not_sample_are_not_traced(stack: Traced) -> None:
    unsampled = CALLER.replace("0af7", "3af7")[:-2] + "00"
    await stack.grpc("r-unsampled", ("traceparent", unsampled))
    await stack.grpc("r-after")
    await stack.collector.trace_of("r-after")
    assert not [span for span in stack.collector.spans if span.trace_id.startswith("3af7")]


async def test_no_text_is_exported(stack: Traced) -> None:
    """No rejected key either, which no log has, at the most verbose log level."""
    key = "sk-bough-keptclosed"
    events = await stack.grpc("r-private", ("authorization", f"Bearer {key}"), session_id="chat-of-anna")
    texts = ["".join(event.tokens.texts) for event in events if event.HasField("tokens")]
    await stack.collector.trace_of("r-private")
    assert any(texts)
    assert key not in "".join(child.log.read_text() for child in stack.cluster.children.values())
    for text in (key, *KEPT_TO_ITSELF, *(text for text in texts if len(text) > 3)):
        assert text.encode() not in stack.collector.raw, text


async def test_logs_of_all_three_services_name_the_request(stack: Traced) -> None:
    """A name of a client's may be anything: it goes from process to process as it is."""
    name = "r-log é\n木"
    await stack.grpc(name, session_id="chat-of-anna")
    spans = await stack.collector.trace_of(name)
    for process in ("orchestrator", "draft_worker", "target_worker"):
        lines = [line for line in stack.log(process) if line.get("request_id") == name]
        assert lines, process
        for line in lines:
            assert {"time", "level", "logger", "message"} <= line.keys()
            assert (line["session_id"], line["trace_id"]) == ("chat-of-anna", spans[0].trace_id)
