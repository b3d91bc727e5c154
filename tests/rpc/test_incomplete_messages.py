"""Endless messages: their memory in a server is limited, and they block no other caller."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import random
import struct
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bough.errors import Exhausted, InvalidRequest
from bough.pb import generation_pb2 as pb
from bough.rpc import arrivals as arrivals_module
from bough.rpc.arrivals import CALLER, WINDOW_BYTES, Arrivals, network
from bough.rpc.server import MAX_HEALTH_BYTES, is_serving, open_channel, serving
from bough.rpc.services import GENERATION, ServicerContext, add_service
from bough.rpc.status_map import MAX_MESSAGE_BYTES, abort
from bough.security.auth_interceptor import AuthInterceptor
from bough.security.keys import credentials, key_in, refusal
from tests.fakes.heap import MIB, rss_bytes
from tests.fakes.http2 import (
    ACK,
    CHECK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    head,
)  # fmt: skip
from tests.fakes.tiers import long_but
from tests.fakes.waiting import until

GENERATE = f"/{GENERATION.full_name}/Generate"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HEALTH_PLACES, PLACES = 16, 64
CALL_BYTES = 32 * 1024  # of an open stream, besides what it has sent
OTHER_MIB = 48  # buffers of connections, and what the allocator has not returned
STREAMS = 1024
SECONDS = 6.0
DEFAULT_WINDOW = 65_535  # bytes, before the server's settings
FRAME_BYTES = 16_384
ADDRESS = "127.0.0.2"  # of strangers, which share what the server allows to one address


class Stranger:
    """One connection, whose streams each send a message of `declared` bytes up to its last byte but one."""

    def __init__(self, path: str, fields: Sequence[tuple[str, str]] = (), declared: int = 4 * MIB) -> None:
        self._head, self._declared = head(path, fields), declared
        self._window, self._initial_window = DEFAULT_WINDOW, DEFAULT_WINDOW
        self.windows: dict[int, int] = {}  # of open streams
        self._left: dict[int, int] = {}  # bytes that each stream has yet to send
        self.max_streams = 0  # as the server limits them; 0 before it has said so
        self.num_sent = 0
        self._may_send = asyncio.Event()
        self.has_ended = False

    async def run(self, port: int, num_streams: int, acks: bool = True) -> None:
        """Send until cancelled, or until the server ends the connection; an ended stream is replaced by a new one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ADDRESS, 0))
        try:
            writer.write(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 2**31 - 1)))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(reader, writer, acks))
                tasks.create_task(self._write(writer, num_streams, acks))
        except* (OSError, asyncio.IncompleteReadError):
            self.has_ended = True
        finally:
            writer.transport.abort()

    async def _write(self, writer: asyncio.StreamWriter, num_streams: int, acks: bool) -> None:
        next_stream = 1
        while True:
            self._may_send.clear()
            if self.max_streams or not acks:
                limit = min(num_streams, self.max_streams) if acks else num_streams
                while len(self.windows) < limit:
                    self._open(writer, next_stream)
                    next_stream += 2
            self._send(writer)
            await writer.drain()
            await self._may_send.wait()

    def _open(self, writer: asyncio.StreamWriter, stream: int) -> None:
        writer.write(frame(HEADERS, END_HEADERS, stream, self._head))
        self.windows[stream], self._left[stream] = self._initial_window, self._declared + 5 - 1

    def _send(self, writer: asyncio.StreamWriter) -> None:
        for stream, left in self._left.items():
            while (size := min(left, self.windows[stream], self._window, FRAME_BYTES)) > 0:
                is_first = left == self._declared + 4
                begin = struct.pack(">BI", 0, self._declared)[:size] if is_first else b""
                writer.write(frame(DATA, 0, stream, begin + bytes(size - len(begin))))
                left -= size
                self._left[stream] = left
                self.windows[stream] -= size
                self._window -= size
                self.num_sent += size

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, acks: bool) -> None:
        while True:
            first = await reader.readexactly(9)
            self._take(first, await reader.readexactly(int.from_bytes(first[:3], "big")), writer, acks)
            self._may_send.set()

    def _take(self, first: bytes, payload: bytes, writer: asyncio.StreamWriter, acks: bool) -> None:
        kind, flags, stream = first[3], first[4], int.from_bytes(first[5:], "big")
        if kind == SETTINGS and not flags & ACK:
            for place in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, place)
                if name == MAX_CONCURRENT_STREAMS:
                    self.max_streams = value
                if name == INITIAL_WINDOW_SIZE:
                    for each in self.windows:
                        self.windows[each] += value - self._initial_window
                    self._initial_window = value
            if acks:
                writer.write(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            writer.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == WINDOW_UPDATE and stream in self.windows:
            self.windows[stream] += int.from_bytes(payload, "big")
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.windows.pop(stream, None)
            self._left.pop(stream, None)
        elif kind == GOAWAY:
            raise ConnectionResetError(payload[8:].decode(errors="replace"))


async def attack(
    process_id: int, port: int, strangers: Sequence[Stranger], num_streams: int, seconds: float, acks: bool = True
) -> dict[str, float]:
    """Let all connections send for `seconds`, and return the figures."""
    before = peak = rss_bytes(process_id)
    tasks = [asyncio.create_task(one.run(port, num_streams, acks)) for one in strangers]
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not all(task.done() for task in tasks):
        await asyncio.sleep(0.05)
        peak = max(peak, rss_bytes(process_id))
    figures = {
        "grown_mib": round((peak - before) / MIB, 1),
        "sent_mib": round(sum(one.num_sent for one in strangers) / MIB, 1),
        "open_streams": sum(len(one.windows) for one in strangers if not one.has_ended),
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures


def name_of(values: Iterable[str | bytes]) -> str:
    """The caller with a key, which is its name."""
    if (key := key_in(values)) not in ("alice", "bob"):
        raise refusal()
    return key


class Answering:
    """A servicer that answers everything."""

    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> AsyncIterator[pb.GenerateEvent]:
        yield pb.GenerateEvent(started=pb.Started(request_id=request.request_id))

    async def Abort(self, request: pb.AbortRequest, context: ServicerContext) -> pb.AbortReply:
        return pb.AbortReply()


def served() -> Any:
    """A server with keys."""
    return serving(
        "127.0.0.1",
        0,
        GENERATION.full_name,
        lambda each: add_service(GENERATION, Answering(), each),
        auth_interceptors=[AuthInterceptor(name_of)],
    )


def serve(ports: Connection) -> None:
    """Run a server in this process until it is ended."""

    async def run() -> None:
        async with served() as running:
            await running.set_ready(True)
            ports.send(running.port)
            await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def server_process() -> Iterator[tuple[int, int]]:
    """A server's process id and port."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    try:
        assert here.poll(60), "the server has not started"
        yield process.pid or 0, here.recv()
    finally:
        process.kill()
        process.join()


async def answered(port: int, key: str) -> str:
    """The request id that a call with this key brings back."""
    async with open_channel(f"127.0.0.1:{port}") as channel:
        ask: Any = channel.unary_stream(GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateEvent.FromString)
        call = ask(pb.GenerateRequest(request_id="mine", text="x" * 100_000), metadata=credentials(key), timeout=60)
        return str((await call.read()).started.request_id)


ENDLESS = [  # calls whose messages never end: connections, method, key, and how many of them may be under way
    *((24, CHECK, "", HEALTH_PLACES), (24, GENERATE, "alice", PLACES), (1, GENERATE, "", 0)),
    *((1, CHECK, "", HEALTH_PLACES), (24, GENERATE, "", 0), (1, GENERATE, "alice", PLACES)),
    *((1, REFLECTION, "alice", PLACES), (24, REFLECTION, "alice", PLACES)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("num_connections", "path", "key", "places"), long_but(ENDLESS[:2], ENDLESS))
async def test_endless_messages_use_limited_memory_and_block_nobody(
    path: str, key: str, places: int, num_connections: int
) -> None:
    """One connection took 1.2 GB in 8 s, without a key, as every stream could fill 4 MiB."""
    with server_process() as (process_id, port):
        strangers = [Stranger(path, credentials(key)) for _ in range(num_connections)]
        attacking = asyncio.create_task(attack(process_id, port, strangers, STREAMS // num_connections, SECONDS))
        await until(lambda: bool(strangers[0].num_sent), 30)
        await asyncio.sleep(1)
        async with open_channel(f"127.0.0.1:{port}") as channel:
            assert await is_serving(channel, GENERATION.full_name, 60)
        assert await answered(port, "bob") == "mine"
        figures = await attacking
    bound = places * MAX_MESSAGE_BYTES + STREAMS * (WINDOW_BYTES + CALL_BYTES) + OTHER_MIB * MIB
    assert figures["grown_mib"] * MIB <= bound


@pytest.mark.slow
async def test_a_message_declared_too_large_is_not_waited_for() -> None:
    with server_process() as (process_id, port):
        stranger = Stranger(GENERATE, credentials("alice"), declared=4_000_000_000)
        figures = await attack(process_id, port, [stranger], 16, SECONDS)
        assert await answered(port, "bob") == "mine"
    assert figures["grown_mib"] <= OTHER_MIB


@pytest.mark.parametrize("window_bytes", [WINDOW_BYTES, MIB])
async def test_larger_windows_leave_a_connection_fewer_streams(window_bytes: int) -> None:
    """A message as large as the window arrives whole before its call is read."""
    add = partial(add_service, GENERATION, object())
    async with serving("127.0.0.1", 0, GENERATION.full_name, add, window_bytes=window_bytes) as running:
        stranger = Stranger(GENERATE)
        connecting = asyncio.create_task(stranger.run(running.port, 1))
        await until(lambda: stranger.max_streams)
        assert stranger._initial_window == window_bytes
        assert stranger.max_streams * window_bytes == STREAMS * WINDOW_BYTES
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)


class Call:
    """A context whose message arrives when `arrived` is set."""

    def __init__(self, data: Any = b"x", peer: str = "ipv4:10.0.0.1:5") -> None:
        self.arrived, self.data, self._peer = asyncio.Event(), data, peer
        self.status: grpc.StatusCode | None = None

    def peer(self) -> str:
        return self._peer

    async def read(self) -> Any:
        await self.arrived.wait()
        return self.data

    async def abort(self, code: grpc.StatusCode, text: str, metadata: object) -> None:
        self.status = code
        raise grpc.aio.AbortError


def reading(arrivals: Arrivals, call: Call) -> asyncio.Task[bytes | None]:
    return asyncio.create_task(arrivals.read(cast(Any, call)))


async def test_a_caller_has_its_share_of_places_and_others_go_to_callers_with_the_fewest() -> None:
    arrivals = Arrivals(3, 2, 60.0, 100)
    greedy = [Call() for _ in range(4)]
    tasks = [reading(arrivals, call) for call in greedy]
    await asyncio.sleep(0)
    other, third = Call(peer="ipv4:10.0.0.2:9"), Call(peer="ipv4:10.0.0.3:1")
    theirs = [reading(arrivals, other), reading(arrivals, third)]
    other.arrived.set()
    assert await asyncio.wait_for(theirs[0], 10) == b"x"
    third.arrived.set()
    assert await asyncio.wait_for(theirs[1], 10) == b"x"
    greedy[2].arrived.set()
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in tasks), "it waits for a place of its own share"
    tasks[3].cancel()
    for call in greedy:
        call.arrived.set()
    assert await asyncio.wait_for(asyncio.gather(*tasks[:3]), 10) == [b"x"] * 3
    assert not arrivals._held.total()
    assert not arrivals._waiting


async def test_named_callers_are_counted_by_name() -> None:
    arrivals, calls = Arrivals(4, 1, 60.0, 100), [Call(peer=f"ipv4:10.0.0.{n}:5") for n in range(3)]

    async def named(call: Call, name: str) -> bytes | None:
        CALLER.set(name)
        return await arrivals.read(cast(Any, call))

    for call in calls:
        call.arrived.set()
    calls[0].arrived.clear()
    names = ("alice", "alice", "bob")
    tasks = [asyncio.create_task(named(*each)) for each in zip(calls, names, strict=True)]
    assert await asyncio.wait_for(tasks[2], 10) == b"x"
    assert not tasks[1].done()
    calls[0].arrived.set()
    assert await asyncio.wait_for(tasks[1], 10) == b"x"


async def test_a_message_that_does_not_arrive_in_time_ends_its_call_and_frees_its_place() -> None:
    arrivals, slow, next_one = Arrivals(1, 1, 0.01, 100), Call(), Call()
    task = reading(arrivals, slow)
    await asyncio.sleep(0)
    next_one.arrived.set()
    waiting = reading(arrivals, next_one)
    with pytest.raises(grpc.aio.AbortError):
        await task
    assert slow.status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await asyncio.wait_for(waiting, 10) == b"x"


async def test_waiting_calls_are_limited_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals_module, "MAX_WAITING", 4)
    monkeypatch.setattr(arrivals_module, "WAIT_SECONDS", 0.05)
    arrivals, first = Arrivals(1, 1, 60.0, 100), Call()
    holding = reading(arrivals, first)
    await asyncio.sleep(0)
    tasks = [reading(arrivals, Call()) for _ in range(3)]
    with pytest.raises(Exhausted, match="messages of 1 calls are arriving") as refused:
        await tasks[2]
    assert refused.value.retry_seconds
    for task in tasks[:2]:
        with pytest.raises(Exhausted):
            await task
    first.arrived.set()
    assert await holding == b"x"


async def test_the_length_of_a_message_is_checked() -> None:
    call = Call(b"x" * 101)
    call.arrived.set()
    with pytest.raises(InvalidRequest, match="message: must have at most 100 bytes, got 101"):
        await Arrivals(1, 1, 60.0, 100).read(cast(Any, call))


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("ipv4:10.0.0.1:1234", "10.0.0.1"),
        ("ipv6:%5B::1%5D:1234", "::/64"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:1", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1234", "fe80::/64"),
        ("unix:/x", ""),
    ],
)
def test_a_caller_is_identified_by_its_address(peer: str, name: str) -> None:
    assert network(peer) == name


async def test_calls_over_a_channel_are_answered_normally() -> None:
    """A health message of some KB, a call without a message, and reflection, whose calls have many."""
    async with served() as running, open_channel(f"127.0.0.1:{running.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        with pytest.raises(grpc.aio.AioRpcError, match=f"at most {MAX_HEALTH_BYTES} bytes") as refused:
            await check(health_pb2.HealthCheckRequest(service="x" * MAX_HEALTH_BYTES))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        nothing: Any = channel.stream_unary(f"/{GENERATION.full_name}/Abort")
        with pytest.raises(grpc.aio.AioRpcError, match="request: must be a message, got none") as refused:
            await nothing(iter(()), metadata=credentials("bob"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as free:
            large: Any = free.unary_unary(f"/{GENERATION.full_name}/Abort")
            with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as refused:
                await large(bytes(MAX_MESSAGE_BYTES + 1), metadata=credentials("bob"))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="") for _ in range(3)]
        answers = [each async for each in stub.ServerReflectionInfo(iter(asked), metadata=credentials("bob"))]
        assert [len(each.list_services_response.service) for each in answers] == [3, 3, 3]


async def test_a_refusal_frees_the_message_before_its_status_is_sent() -> None:
    """300 refused calls had all their messages at once: 4.8 GB, which the allocator then did not return."""
    status_sent = list[int]()

    class Sending(Call):
        async def abort(self, code: grpc.StatusCode, text: str, metadata: object) -> None:
            status_sent.append(len(living))
            await super().abort(code, text, metadata)

    class Message:
        """Is referenced weakly."""

    living = weakref.WeakSet[Message]()

    async def refuse() -> None:
        message = Message()
        living.add(message)
        try:
            raise ValueError("within")
        except ValueError as exc:
            raise InvalidRequest("message", "must be another") from exc

    try:
        await refuse()
    except InvalidRequest as exc:
        assert living
        with pytest.raises(grpc.aio.AbortError):
            await abort(cast(Any, Sending()), exc)
    assert status_sent == [0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_no_order_of_frames_ends_the_server(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    message = pb.GenerateRequest(text="x" * 300).SerializeToString()
    heads = [head(path, credentials(key)) for path in (CHECK, GENERATE, REFLECTION) for key in ("", "alice")]

    def drawn() -> bytes:
        stream, kind = 2 * rng.randrange(40) + 1, rng.choice((HEADERS, DATA, DATA, RST_STREAM))
        if kind == HEADERS:
            return frame(kind, END_HEADERS | rng.randrange(2), stream, rng.choice(heads))
        if kind == RST_STREAM:
            return frame(kind, 0, stream, struct.pack(">I", rng.randrange(14)))
        size = rng.choice((0, len(message), len(message), 70_000, 2**32 - 1))
        whole = struct.pack(">BI", rng.choice((0, 0, 0, 1)), size) + message
        begin, end = sorted(rng.choices((0, 1, 5, 100, len(whole)), k=2))
        return frame(kind, rng.randrange(2), stream, whole[begin:end])

    async with served() as running:
        for _ in range(60):
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            opened = b"".join(frame(HEADERS, END_HEADERS, 2 * n + 1, rng.choice(heads)) for n in range(40))
            writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + rng.choice((opened, b"")))
            for _ in range(rng.randrange(60)):
                writer.write(drawn())
            with suppress(ConnectionError):  # the server ended the connection
                await writer.drain()
            await asyncio.sleep(rng.choice((0, 0.01)))
            writer.transport.abort()
        async with open_channel(f"127.0.0.1:{running.port}") as channel:
            assert await is_serving(channel, "", 30)
        assert await answered(running.port, "bob") == "mine"
    errors = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert not errors
