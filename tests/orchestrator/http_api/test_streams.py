"""The life of an HTTP connection: clients that leave or stop reading, errors half-way, draining, and its end."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from bough.client import Client
from bough.errors import ConfigError, Unavailable
from bough.pb import generation_pb2 as pb
from bough.protocol.ids import ScopedId
from bough.rpc.server import open_channel
from bough.rpc.services import GENERATION, stub_of
from bough.security import tls
from bough.security.tls import _Handshake
from orchestrator.admission.admission import Admission
from orchestrator.assembly import Orchestrator, assembled
from orchestrator.cluster.worker_handle import Health, Pause
from orchestrator.http_api import body, exchange, server
from orchestrator.http_api.app import http_app
from orchestrator.http_api.server import http_serving
from orchestrator.serving.tenants import Callers
from tests.fakes.certificates import Authority
from tests.fakes.http_stack import HttpStack, Json, error_of, http_stack
from tests.fakes.stage import Stage, config_of
from tests.fakes.waiting import PATIENCE_SECONDS, until

pytestmark = pytest.mark.slow  # running services are called


PATH = "/v1/chat/completions"
BODY: Json = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "speculation": False, "seed": 1}
ENDLESS = BODY | {"max_tokens": 4000}
JSON = {"content-type": "application/json"}
SLOW = {"clock_scale": 1.0}  # half a second a sweep


@pytest.fixture(scope="module")
async def slow(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpStack]:
    async with http_stack(tmp_path_factory.mktemp("slow"), **SLOW) as running:
        yield running


def head(num_bytes: int) -> bytes:
    """What comes before a body of this length."""
    lines = (f"POST {PATH} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {num_bytes}")
    return "\r\n".join((*lines, "", "")).encode()


async def until_running(endpoint: HttpStack, num: int) -> None:
    """Wait until this many requests run."""
    await until(lambda: endpoint.stack.requests.loads().num_requests_running == num)


async def test_a_reader_that_leaves_mid_stream_frees_its_place(endpoint: HttpStack) -> None:
    async with endpoint.client.stream("POST", PATH, json=ENDLESS | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if '"content":" ' in line:
                break
    await until_running(endpoint, 0)


async def test_a_new_request_waits_for_a_missing_target(endpoint: HttpStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream sends keep-alives meanwhile. Without a target in time the request is refused with a retry delay."""
    monkeypatch.setattr(exchange, "SILENT_SECONDS", 0.02)
    requests = endpoint.stack.requests
    (target,) = requests.directory.targets
    target.health = Health(Pause(until=math.inf))
    with monkeypatch.context() as impatient:
        impatient.setattr(requests.opening.waiting, "most_seconds", 0.0)
        refused = await endpoint.post(PATH, BODY)
    assert (refused.status_code, error_of(refused)["code"]) == (503, "unavailable")
    assert int(refused.headers["retry-after"]) > 0
    async with endpoint.client.stream("POST", PATH, json=BODY | {"max_tokens": 2, "stream": True}) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        assert requests.figures().num_held == 1
        target.health = Health()
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert not any("error" in line for line in rest)


async def test_chunks_are_sent_without_waiting_for_acknowledgements(endpoint: HttpStack) -> None:
    """Otherwise chunks that are written within 40 ms arrive 40 ms apart."""
    endpoint.transports.clear()
    await endpoint.post(PATH, BODY | {"max_tokens": 1})
    connection = endpoint.transports[0].get_extra_info("socket")
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_an_error_in_a_stream_is_an_event(endpoint: HttpStack) -> None:
    asked = ENDLESS | {"stream": True, "session_id": "closed half-way"}
    events = []
    async with endpoint.client.stream("POST", PATH, json=asked) as response:
        async for line in response.aiter_lines():
            if line:
                events.append(line)
            if line and len(events) == 3:
                await endpoint.stack.requests.close_session(ScopedId("closed half-way"))
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert (error["param"], error["code"]) == ("session_id", "session_moved")
    await until_running(endpoint, 0)


async def test_a_second_request_of_a_busy_session_is_a_conflict(endpoint: HttpStack) -> None:
    """It is a conflict and no invalid request: the same request would be served a moment later."""
    asked = ENDLESS | {"session_id": "busy"}
    async with endpoint.client.stream("POST", PATH, json=asked | {"stream": True}):
        refused = await endpoint.post(PATH, asked)
        error = error_of(refused)
        assert (refused.status_code, error["type"], error["code"]) == (409, "conflict_error", "already_running")
        assert (error["param"], refused.headers["x-should-retry"]) == ("session_id", "false")
        assert error["message"].startswith("session_id: 'busy' has a request running; wait for its end")
        async with open_channel(endpoint.stack.addresses["orchestrator"]) as channel:
            request = pb.GenerateRequest(text="x", session_id="busy")
            assert await stub_of(GENERATION, channel).Generate(request).code() is grpc.StatusCode.ABORTED
    await until_running(endpoint, 0)


async def test_an_aborted_request_is_reported_as_aborted(endpoint: HttpStack) -> None:
    reasons = []
    async with endpoint.client.stream("POST", PATH, json=ENDLESS | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if not reasons:
                    endpoint.stack.requests.abort(ScopedId(chunk["id"]))
                reasons += [choice["finish_reason"] for choice in chunk["choices"]]
    assert reasons[-1] == "abort"


async def test_a_draining_orchestrator_reports_it_to_everyone(
    endpoint: HttpStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = Admission(max_running=4, max_waiting=4)
    monkeypatch.setattr(endpoint.stack.requests, "admission", admission)
    assert (await endpoint.client.get("/health")).status_code == 200
    admission.close("this orchestrator is draining")
    for response in (await endpoint.post(PATH, BODY), await endpoint.client.get("/health")):
        assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")
        assert int(response.headers["retry-after"]) >= 1


async def test_without_a_target_requests_are_refused(endpoint: HttpStack, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object) -> None:
        raise Unavailable("no target worker can be used")

    monkeypatch.setattr(type(endpoint.stack.requests), "models", nobody)
    response = await endpoint.client.get("/v1/models")
    assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")


async def test_a_client_that_stops_reading_loses_its_connection_and_place(tmp_path: Path) -> None:
    async with http_stack(tmp_path, stalled_seconds=0.2, idle_seconds=0.2) as endpoint:
        content = json.dumps(ENDLESS | {"stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", endpoint.port))
            await loop.sock_sendall(client, head(len(content)) + content)
            await until_running(endpoint, 1)
            (transport,) = endpoint.transports  # whose kernel would by itself keep megabytes for a client
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            await until_running(endpoint, 0)
            await until(lambda: transport.is_closing())
            assert transport.get_write_buffer_size() == 0, "what it did not read is not kept for it"


async def test_the_server_ignores_signals_and_ends_with_its_block(endpoint: HttpStack) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    app = http_app(Callers(endpoint.stack.requests), CollectorRegistry())
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


async def test_a_body_that_does_not_arrive_is_not_waited_for(
    endpoint: HttpStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "READ_SECONDS", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(head(100) + b"{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    writer.close()
    await writer.wait_closed()


async def test_bodies_share_one_memory_limit(endpoint: HttpStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_ALL_BYTES", 1000)
    may_go_on = asyncio.Event()
    content = json.dumps(BODY | {"max_tokens": 1, "user": "x" * 500}).encode()

    async def slow() -> AsyncIterator[bytes]:
        yield content[:-10]
        await may_go_on.wait()
        yield content[-10:]

    first = asyncio.create_task(endpoint.client.post(PATH, content=slow(), headers=JSON))
    statuses = set[int]()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while 429 not in statuses:  # as soon as the first one's bytes are there
            statuses.add((await endpoint.client.post(PATH, content=content, headers=JSON)).status_code)
    may_go_on.set()
    assert (await first).status_code == 200
    assert (await endpoint.client.post(PATH, content=content, headers=JSON)).status_code == 200
    assert statuses <= {200, 429}


COMPLETIONS = "/v1/completions"
SHORT: Json = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
LONG = SHORT | {"max_tokens": 50_000}


def client_of(orchestrator: Orchestrator) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=orchestrator.requests.http_url, timeout=60)


async def test_running_requests_finish_while_new_ones_are_refused(stage: Stage) -> None:
    stop = asyncio.Event()
    async with assembled(config_of(stage), stop) as orchestrator, client_of(orchestrator) as client:
        await until(lambda: orchestrator.is_ready)
        serving = asyncio.create_task(orchestrator.serve(stop))
        assert (await client.get("/health")).status_code == 200
        stage.target.may_answer.clear()
        running = [asyncio.create_task(client.post(COMPLETIONS, json=SHORT | {"stream": way})) for way in (False, True)]
        await until(lambda: len(stage.target.asked) == 2)
        stop.set()
        await until(lambda: orchestrator.requests.admission.is_closed)
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        stage.target.may_answer.set()
        whole, stream = await asyncio.gather(*running)
        assert whole.json()["choices"][0]["finish_reason"] == "length"
        assert stream.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in stream.text
        await serving


async def test_requests_that_do_not_finish_in_time_end_with_an_error(stage: Stage) -> None:
    stop = asyncio.Event()
    async with (
        assembled(config_of(stage, "--drain-seconds", "0.2"), stop) as orchestrator,
        client_of(orchestrator) as client,
    ):
        await until(lambda: orchestrator.is_ready)
        serving = asyncio.create_task(orchestrator.serve(stop))
        running = [asyncio.create_task(client.post(COMPLETIONS, json=LONG | {"stream": way})) for way in (False, True)]
        await until(lambda: stage.target.num_verified > 4)
        stop.set()
        await serving
        whole, stream = await asyncio.gather(*running)
        assert (whole.status_code, error_of(whole)["code"]) == (503, "unavailable")
        *_, error, done, _ = stream.text.split("\n\n")
        assert done == "data: [DONE]"
        assert "cut off" in json.loads(error.removeprefix("data: "))["error"]["message"]


async def test_a_client_that_disconnects_ends_the_call_at_the_target(stage: Stage) -> None:
    async with assembled(config_of(stage), asyncio.Event()) as orchestrator, client_of(orchestrator) as client:
        await until(lambda: orchestrator.is_ready)
        stage.target.may_answer.clear()
        for number, is_stream in enumerate((False, True), start=1):
            asking = asyncio.create_task(client.post(COMPLETIONS, json=LONG | {"stream": is_stream}))
            await until(lambda number=number: len(stage.target.asked) == number)
            asking.cancel()
            await until(lambda number=number: len(stage.target.cancelled) == number)
        await until(lambda: orchestrator.requests.loads().num_requests_running == 0)


async def test_server_info_has_the_http_address_or_none(stage: Stage) -> None:
    for flags, is_open in (((), True), (("--http-port", "-1"), False)):
        async with (
            assembled(config_of(stage, *flags), asyncio.Event()) as orchestrator,
            Client(f"127.0.0.1:{orchestrator.port}") as client,
        ):
            url = (await client.server_info()).http_url
            assert url.startswith("http://127.0.0.1:") is is_open
            assert bool(url) is is_open


async def test_a_connection_accepted_during_shutdown_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio hands over a connection some steps after accepting it: such a one stayed open, and could ask on."""
    arrived, told = list[Callable[[], None]](), list[bool]()
    connection_made, on_tick = server._Protocol.connection_made, server._HttpServer.on_tick

    def late(self: server._Protocol, transport: asyncio.Transport) -> None:
        arrived.append(partial(connection_made, self, transport))

    async def noted(self: server._HttpServer, counter: int) -> bool:
        is_over = await on_tick(self, counter)
        told.append(self._has_left)
        return is_over

    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        """Accept connections without answering."""

    monkeypatch.setattr(server._Protocol, "connection_made", late)
    monkeypatch.setattr(server._HttpServer, "on_tick", noted)
    leaving = asyncio.Event()
    async with server.http_serving("127.0.0.1", 0, nothing, leaving=leaving) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: arrived)
        leaving.set()
        await until(lambda: True in told)  # open connections have been asked to close
        arrived[0]()
        async with asyncio.timeout(20.0):  # an idle connection would stay open for a minute
            assert await reader.read() == b""
        writer.close()


async def test_a_handshake_in_progress_does_not_end_the_server(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a connection like others to a server that leaves, and had no `transport`: what was answered was lost."""
    begun, connection_made = list[_Handshake](), _Handshake.connection_made

    def noted(self: _Handshake, transport: asyncio.Transport) -> None:
        connection_made(self, transport)
        begun.append(self)

    monkeypatch.setattr(_Handshake, "connection_made", noted)
    monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 600.0)
    authority, stop = Authority(), asyncio.Event()
    certificate, key = authority.pair("endpoint").write(tmp_path, "endpoint")
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    config = config_of(stage, "--tls-cert", str(certificate), "--tls-key", str(key))
    async with assembled(config, stop) as orchestrator:
        url = httpx.URL(orchestrator.requests.http_url)
        async with httpx.AsyncClient(base_url=url, verify=context, timeout=60) as client:
            await until(lambda: orchestrator.is_ready)
            serving = asyncio.create_task(orchestrator.serve(stop))
            stage.target.may_answer.clear()
            running = asyncio.create_task(client.post(COMPLETIONS, json=SHORT))
            await until(lambda: stage.target.asked)
            reader, writer = await asyncio.open_connection(url.host, url.port)
            await until(lambda: len(begun) == 2)
            stop.set()
            async with asyncio.timeout(20.0):  # it would have ten minutes for its handshake
                assert await reader.read() == b""
            stage.target.may_answer.set()
            assert (await running).json()["choices"][0]["finish_reason"] == "length"
            await serving
            writer.close()
