"""The life of a connection: clients that leave, or stop reading; errors half-way; the server's own end."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from bough.errors import ConfigError
from bough.pb import generation_pb2 as pb
from bough.rpc.server import open_channel
from bough.rpc.services import GENERATION, stub_of
from orchestrator.admission.admission import Admission
from orchestrator.http_api import body, exchange, server
from orchestrator.http_api.app import http_app
from orchestrator.http_api.server import http_serving
from orchestrator.serving.tenants import Callers
from tests.fakes.http_stack import HttpStack, Json, error_of, http_stack
from tests.fakes.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow  # running services are called
PATH = "/v1/chat/completions"
BODY: Json = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "speculation": False, "seed": 1}
ENDLESS = BODY | {"max_tokens": 4000}
JSON = {"content-type": "application/json"}
SLOW = {"clock_scale": 1.0}  # half a second a sweep


@pytest.fixture(scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpStack]:
    async with http_stack(tmp_path_factory.mktemp("streams")) as running:
        yield running


@pytest.fixture(scope="module")
async def slow(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpStack]:
    async with http_stack(tmp_path_factory.mktemp("slow"), **SLOW) as running:
        yield running


def head(num_bytes: int) -> bytes:
    """What comes before a body of this length."""
    lines = (f"POST {PATH} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {num_bytes}")
    return "\r\n".join((*lines, "", "")).encode()


async def until_running(door: HttpStack, num: int) -> None:
    """Wait until so many requests run."""
    await until(lambda: door.stack.requests.loads().num_requests_running == num)


async def test_a_reader_that_leaves_in_the_middle_frees_its_place(door: HttpStack) -> None:
    async with door.client.stream("POST", PATH, json=ENDLESS | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if '"content":" ' in line:
                break
    await until_running(door, 0)


async def test_a_new_request_waits_for_a_target_that_is_away(door: HttpStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream says meanwhile that it is alive. Without one in time it is refused, and told when to come again."""
    monkeypatch.setattr(exchange, "SILENT_SECONDS", 0.02)
    requests = door.stack.requests
    (target,) = requests.directory.targets
    monkeypatch.setattr(target.health._pause, "until", math.inf)
    with monkeypatch.context() as impatient:
        impatient.setattr(requests.opening.waiting, "most_seconds", 0.0)
        refused = await door.post(PATH, BODY)
    assert (refused.status_code, error_of(refused)["code"]) == (503, "unavailable")
    assert int(refused.headers["retry-after"]) > 0
    async with door.client.stream("POST", PATH, json=BODY | {"max_tokens": 2, "stream": True}) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        assert requests.figures().num_held == 1
        target.health._pause.until = 0.0
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert not any("error" in line for line in rest)


async def test_an_error_half_way_is_an_event_of_the_stream(door: HttpStack) -> None:
    asked = ENDLESS | {"stream": True, "session_id": "closed half-way"}
    events = []
    async with door.client.stream("POST", PATH, json=asked) as response:
        async for line in response.aiter_lines():
            if line:
                events.append(line)
            if line and len(events) == 3:
                await door.stack.requests.close_session("closed half-way")
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert (error["param"], error["code"]) == ("session_id", "session_moved")
    await until_running(door, 0)


async def test_a_session_that_has_a_request_running_is_in_conflict_with_another(door: HttpStack) -> None:
    """It was told as if the request were wrong, whose like would be served a moment later."""
    asked = ENDLESS | {"session_id": "busy"}
    async with door.client.stream("POST", PATH, json=asked | {"stream": True}):
        refused = await door.post(PATH, asked)
        error = error_of(refused)
        assert (refused.status_code, error["type"], error["code"]) == (409, "conflict_error", "already_running")
        assert (error["param"], refused.headers["x-should-retry"]) == ("session_id", "false")
        assert error["message"].startswith("session_id: 'busy' has a request running; wait for its end")
        async with open_channel(door.stack.addresses["orchestrator"]) as channel:
            request = pb.GenerateRequest(text="x", session_id="busy")
            assert await stub_of(GENERATION, channel).Generate(request).code() is grpc.StatusCode.ABORTED
    await until_running(door, 0)


async def test_an_aborted_request_ends_as_such(door: HttpStack) -> None:
    reasons = []
    async with door.client.stream("POST", PATH, json=ENDLESS | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if not reasons:
                    door.stack.requests.abort(chunk["id"])
                reasons += [choice["finish_reason"] for choice in chunk["choices"]]
    assert reasons[-1] == "abort"


async def test_an_orchestrator_that_drains_says_so_to_everyone(
    door: HttpStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = Admission(max_running=4, max_waiting=4)
    monkeypatch.setattr(door.stack.requests, "admission", admission)
    assert (await door.client.get("/health")).status_code == 200
    admission.close("this orchestrator is draining")
    for response in (await door.post(PATH, BODY), await door.client.get("/health")):
        assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")
        assert int(response.headers["retry-after"]) >= 1


async def test_a_client_that_stops_reading_loses_its_connection_and_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.2)
    async with http_stack(tmp_path, stalled_seconds=0.2) as door:
        content = json.dumps(ENDLESS | {"stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", door.port))
            await loop.sock_sendall(client, head(len(content)) + content)
            await until_running(door, 1)
            (transport,) = door.transports  # whose kernel would by itself keep megabytes for a client
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            await until_running(door, 0)
            await until(lambda: transport.is_closing())
            assert transport.get_write_buffer_size() == 0, "what it did not read is not kept for it"


async def test_the_server_takes_no_signals_and_ends_with_its_block(door: HttpStack) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    app = http_app(Callers(door.stack.requests), CollectorRegistry())
    async with http_serving("127.0.0.1", 0, app) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/version"
        assert (await client.get(url)).status_code == 200
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
        with pytest.raises(ConfigError, match=rf"--http-port: cannot listen on 127\.0\.0\.1:{port}"):
            async with http_serving("127.0.0.1", port, app):
                pass
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)


async def test_a_body_that_does_not_arrive_is_not_waited_for(door: HttpStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "READ_SECONDS", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(head(100) + b"{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    writer.close()
    await writer.wait_closed()


async def test_bodies_have_one_memory_together(door: HttpStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_ALL_BYTES", 1000)
    may_go_on = asyncio.Event()
    content = json.dumps(BODY | {"max_tokens": 1, "user": "x" * 500}).encode()

    async def slow() -> AsyncIterator[bytes]:
        yield content[:-10]
        await may_go_on.wait()
        yield content[-10:]

    first = asyncio.create_task(door.client.post(PATH, content=slow(), headers=JSON))
    statuses = set[int]()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while 429 not in statuses:  # as soon as the first one's bytes are there
            statuses.add((await door.client.post(PATH, content=content, headers=JSON)).status_code)
    may_go_on.set()
    assert (await first).status_code == 200
    assert (await door.client.post(PATH, content=content, headers=JSON)).status_code == 200
    assert statuses <= {200, 429}
