"""Overload, deadlines, callers that leave or do not read, and sizes: a clear status each, and everything freed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from bough.errors import DeadlineExceeded, Exhausted, InvalidRequest, StaleEpoch
from bough.pb import generation_pb2
from bough.protocol import codec_generation as wire
from bough.protocol.generation import (
    ChatPrompt,
    GenerateOptions,
    Message,
    Prompt,
    Resume,
    TextPrompt,
    TokenPrompt,
    Usage,
)
from bough.rpc.server import open_channel
from bough.rpc.services import GENERATION, stub_of
from bough.rpc.status_map import DETAILS_KEY, ERROR_KEY, MAX_MESSAGE_BYTES, to_error
from tests.fakes.stage import LONG, MAX_CONTEXT, PROMPT, SHORT, TOKEN, Orchestrator, Stage, finish, orchestrating
from tests.fakes.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow  # running services are called


def request(options: GenerateOptions = LONG) -> generation_pb2.GenerateRequest:
    return wire.request_to_wire(PROMPT, options)


# Overload


async def test_a_request_beyond_the_limit_is_refused_at_once_with_a_retry_delay(stage: Stage) -> None:
    """Any gRPC client can read the delay: it is a google.rpc.RetryInfo, read here by gRPC's own reader."""
    stage.target.may_answer.clear()
    async with orchestrating(stage, "--max-running", "2", "--max-waiting", "1") as orchestrator:
        running = [asyncio.create_task(finish(orchestrator)) for _ in range(3)]
        loads = await eventually(orchestrator, running=2, waiting=1)
        assert (loads.max_requests_running, loads.max_requests_waiting) == (2, 1)
        assert loads.wait_seconds > 0
        with pytest.raises(Exhausted, match="2 requests run and 1 wait") as caught:  # after a wait the message differs
            await finish(orchestrator)
        assert caught.value.retry_seconds is not None
        assert caught.value.retry_seconds >= 1.0
        async with open_channel(orchestrator.address) as channel:
            call = stub_of(GENERATION, channel).Generate(request())
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            status = await rpc_status.aio.from_call(call)
        info = error_details_pb2.RetryInfo()
        assert [detail.Unpack(info) for detail in status.details] == [True]
        assert info.retry_delay.ToMilliseconds() >= 1000
        stage.target.may_answer.set()
        assert [(await task).usage.completion_tokens for task in running] == [3, 3, 3]
        await eventually(orchestrator, running=0, waiting=0)


async def eventually(orchestrator: Orchestrator, running: int, waiting: int) -> generation_pb2.Loads:
    """The loads, once they are these."""
    for _ in range(500):
        loads = await orchestrator.client.loads()
        if (loads.num_requests_running, loads.num_requests_waiting) == (running, waiting):
            return loads
        await asyncio.sleep(0.02)
    raise AssertionError(loads)


async def test_a_waiting_request_is_aborted_at_once(stage: Stage) -> None:
    stage.target.may_answer.clear()
    async with orchestrating(stage, "--max-running", "1") as orchestrator:
        first = asyncio.create_task(finish(orchestrator))
        await eventually(orchestrator, running=1, waiting=0)
        second = asyncio.create_task(finish(orchestrator, options=replace(SHORT, request_id="second")))
        await eventually(orchestrator, running=1, waiting=1)
        await orchestrator.client.abort("second")
        ended = await asyncio.wait_for(second, 5)
        assert (ended.finish_reason, ended.usage) == ("abort", Usage(0, 0, 0))
        await eventually(orchestrator, running=1, waiting=0)
        stage.target.may_answer.set()
        assert (await first).finish_reason == "length"
        assert (await finish(orchestrator)).finish_reason == "length"  # the place is not lost


async def test_a_waiting_request_that_is_resumed_leaves_the_queue(stage: Stage) -> None:
    """In its turn the old call once took the session from the new one."""
    stage.target.may_answer.clear()
    async with orchestrating(stage, "--max-running", "1") as orchestrator:
        first = asyncio.create_task(finish(orchestrator))
        await eventually(orchestrator, running=1, waiting=0)
        options = replace(SHORT, request_id="r", session_id="s")
        old = asyncio.create_task(finish(orchestrator, options=options))
        await eventually(orchestrator, running=1, waiting=1)
        new = asyncio.create_task(finish(orchestrator, options=replace(options, resume=Resume(0))))
        with pytest.raises(StaleEpoch, match="has been resumed by another call"):
            await asyncio.wait_for(old, 5)
        stage.target.may_answer.set()
        assert (await first).finish_reason == (await new).finish_reason == "length"


class Refusal(grpc.aio.AioRpcError):
    """What a peer that is not ours may send."""

    def __init__(self, details: bytes | str | None) -> None:
        pairs = [(ERROR_KEY, "Exhausted"), *([(DETAILS_KEY, details)] if details is not None else [])]
        trailing = grpc.aio.Metadata(*pairs)
        super().__init__(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailing, "full")


@pytest.mark.parametrize("details", [None, b"", b"\xff\xff\xff", "text"])
def test_unreadable_error_details_give_no_delay(details: bytes | str | None) -> None:
    error = to_error(Refusal(details), "somewhere")
    assert isinstance(error, Exhausted)
    assert (str(error), error.retry_seconds) == ("full", None)


# Deadlines, and callers that leave


async def test_a_deadline_ends_the_request_and_frees_everything(stage: Stage, orchestrator: Orchestrator) -> None:
    stage.target.may_answer.clear()
    async with open_channel(orchestrator.address) as channel:
        call = stub_of(GENERATION, channel).Generate(request(), timeout=2.0)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: stage.target.cancelled == stage.target.released == stage.target.asked != [])
    assert stage.target.time_limits[0] < 5.0  # the target received it too, not 600 s
    await eventually(orchestrator, running=0, waiting=0)
    stage.target.may_answer.set()
    assert (await finish(orchestrator)).finish_reason == "length"  # at once: the target has done nothing wrong


async def test_a_deadline_also_passes_in_the_queue(stage: Stage) -> None:
    stage.target.may_answer.clear()
    async with orchestrating(stage, "--max-running", "1") as orchestrator:
        first = asyncio.create_task(finish(orchestrator))
        await eventually(orchestrator, running=1, waiting=0)
        with pytest.raises(DeadlineExceeded):
            await anext(orchestrator.requests.generate(PROMPT, LONG, timeout_seconds=0.2))
        await eventually(orchestrator, running=1, waiting=0)
        stage.target.may_answer.set()
        await first


@pytest.mark.parametrize("num_events", [1, 20])
async def test_a_client_that_disappears_frees_everything(
    stage: Stage, orchestrator: Orchestrator, num_events: int
) -> None:
    """Whether it goes in the middle of the first sweep or later."""
    stage.target.sweep_seconds = 0.005
    channel = open_channel(orchestrator.address)
    call = stub_of(GENERATION, channel).Generate(request())
    for _ in range(num_events):
        await call.read()
    stage.target.may_answer.clear()
    asked = len(stage.target.asked)
    await until(lambda: len(stage.target.asked) > asked)
    await channel.close()
    await until(lambda: stage.target.released)
    assert stage.target.cancelled == stage.target.released == stage.target.asked[:1]
    await eventually(orchestrator, running=0, waiting=0)


# Slow readers


def slow_channel(address: str) -> grpc.aio.Channel:
    """Of a client whose window stays at HTTP/2's 64 KiB."""
    return grpc.aio.insecure_channel(address, options=[("grpc.http2.bdp_probe", 0)])


async def count_to_the_end(call: grpc.aio.UnaryStreamCall[object, object], pause_seconds: float = 0.0) -> int:
    """Events read before a stream ended, however it did."""
    num_read = 0
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            num_read += 1
            await asyncio.sleep(pause_seconds)
    return num_read


WORDY = replace(LONG, logprobs=64)  # 0.6 KB a round


async def test_rounds_pause_for_a_client_that_stops_reading(stage: Stage, orchestrator: Orchestrator) -> None:
    """What runs ahead is what fits the client's window and gRPC's buffers, and no more however long it sleeps."""
    async with slow_channel(orchestrator.address) as channel:
        call = stub_of(GENERATION, channel).Generate(request(WORDY))
        await call.read()
        before = -1
        async with asyncio.timeout(PATIENCE_SECONDS):
            while before < stage.target.num_verified:
                before = stage.target.num_verified
                await asyncio.sleep(1.0)
        sizes = [(await call.read()).ByteSize() for _ in range(before)]
        assert 50_000 < sum(sizes) < 500_000
        await until(lambda: stage.target.num_verified > before + 10)  # and it continues when it reads again
        call.cancel()
    await until(lambda: stage.target.released)


@pytest.mark.parametrize("session_id", ["", "kept"])
async def test_a_stalled_stream_is_ended_and_frees_everything(stage: Stage, session_id: str) -> None:
    async with (
        orchestrating(stage, "--stalled-timeout", "0.5") as orchestrator,
        slow_channel(orchestrator.address) as channel,
    ):
        wordy = wire.request_to_wire(TokenPrompt((1, 2)), replace(WORDY, session_id=session_id))
        call = stub_of(GENERATION, channel).Generate(wordy)
        await call.read()
        await until(lambda: stage.target.asked)
        await eventually(orchestrator, running=0, waiting=0)
        num_read = await count_to_the_end(call)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "has not been read for 0.5 s; it is ended, and can be resumed" in await call.details()
        assert num_read > 10  # what was sent before is not lost
        if session_id:  # its text is not computed again when it comes back
            history = TokenPrompt((1, 2, *[TOKEN] * num_read))
            before = len(stage.target.asked)
            assert (await finish(orchestrator, history, replace(SHORT, session_id="kept"))).usage.cached_tokens > 10
            assert len(stage.target.asked) == before + 3
            assert not stage.target.released
        else:
            await until(lambda: stage.target.released)


# Sizes


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        (TextPrompt("x" * (4 * MAX_CONTEXT + 1)), {}, "text: 400001 characters, .* at most 400000 characters can fit"),
        (ChatPrompt((Message("user", "x" * 400_001),)), {}, r"chat\.messages: 400001 characters"),
        (
            ChatPrompt((Message("user", ""),) * 100_001),
            {},
            "message: must have at most 32768 fields, got 32769 or more",
        ),
        (
            ChatPrompt((Message("user", "x"), Message("r" * 257, ""))),
            {},
            r"chat\.messages\[1\]\.role: must have at most 256 characters, got 257",
        ),
        (TokenPrompt((1,) * MAX_CONTEXT), {}, "prompt: 100000 tokens, .* at most 99999 tokens can fit"),
        (
            TextPrompt("x" * MAX_CONTEXT),
            {},
            "prompt: 100000 tokens, so the prompt is too long: this model's maximum context length is 100000 tokens",
        ),
        (PROMPT, {"stop": ("x",) * 65}, "stop: must have at most 64 entries, got 65"),
        (PROMPT, {"stop": ("a", "x" * 1025)}, r"stop\[1\]: must be at most 1024 characters, got 1025"),
        (
            PROMPT,
            {"stop_token_ids": frozenset(range(1025))},
            "stop_token_ids: must have at most 1024 entries, got 1025",
        ),
        (
            PROMPT,
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "logit_bias: must have at most 1024 entries, got 1025",
        ),
        (PROMPT, {"logprobs": 65}, "logprobs: must be 0 to 64, got 65"),
        (PROMPT, {"session_id": "s" * 257}, "session_id: must have at most 256 characters, got 257"),
        (PROMPT, {"model": "m" * 257}, "model: must have at most 256 characters, got 257"),
        (PROMPT, {"request_id": "r" * 257}, "request_id: must have at most 256 characters, got 257"),
    ],
)
async def test_fields_that_are_too_large_are_refused_by_name(
    orchestrator: Orchestrator, prompt: Prompt, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await finish(orchestrator, prompt, replace(SHORT, **changes))
    largest = replace(SHORT, stop=("~",) * 64, logprobs=64, session_id="s" * 256, stop_token_ids=frozenset({1}))
    assert (await finish(orchestrator, options=largest)).usage.completion_tokens == 3


async def test_a_message_over_the_limit_is_refused_with_the_limits_name(orchestrator: Orchestrator) -> None:
    """Whether our own client is asked to send it or another one does."""
    with pytest.raises(InvalidRequest, match=f"message: must have at most {MAX_MESSAGE_BYTES} bytes, got"):
        await finish(orchestrator, TextPrompt("x" * (MAX_MESSAGE_BYTES + 1)))
    async with grpc.aio.insecure_channel(orchestrator.address) as channel:
        large = generation_pb2.GenerateRequest(text="x" * (MAX_MESSAGE_BYTES + 1))
        call = stub_of(GENERATION, channel).Generate(large)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(MAX_MESSAGE_BYTES) in await call.details()
    assert (await finish(orchestrator)).usage.completion_tokens == 3


# What a balancer asks


async def test_health_can_be_watched(stage: Stage, orchestrator: Orchestrator) -> None:
    async with open_channel(orchestrator.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="bough.v1.Generation"))
        states = [(await watch.read()).status]
        await orchestrator.served.set_ready(True)
        states.append((await watch.read()).status)
        await orchestrator.served.leave()
        states.append((await watch.read()).status)
        await orchestrator.served.set_ready(True)  # who has taken leave does not come back
        whole = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        watch.cancel()
    reply = health_pb2.HealthCheckResponse
    assert states == [reply.NOT_SERVING, reply.SERVING, reply.NOT_SERVING]
    assert whole.status == reply.NOT_SERVING
