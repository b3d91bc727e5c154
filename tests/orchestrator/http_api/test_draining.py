"""The HTTP front door of an assembled orchestrator: it opens and drains with it, before a target that can be held."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from bough.client import Client
from bough.security import tls
from bough.security.tls import _Handshake
from orchestrator.assembly import Orchestrator, assembled
from orchestrator.http_api import server
from tests.fakes.certificates import Authority
from tests.fakes.http_stack import Json, error_of
from tests.fakes.stage import Stage, config_of
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
PATH = "/v1/completions"
SHORT: Json = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
LONG = SHORT | {"max_tokens": 50_000}


def client_of(orchestrator: Orchestrator) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=orchestrator.requests.http_url, timeout=60)


async def test_what_runs_finishes_while_nobody_new_reaches_it(stage: Stage) -> None:
    stop = asyncio.Event()
    async with assembled(config_of(stage), stop) as orchestrator, client_of(orchestrator) as client:
        await until(lambda: orchestrator.is_ready)
        serving = asyncio.create_task(orchestrator.serve(stop))
        assert (await client.get("/health")).status_code == 200
        stage.target.may_answer.clear()
        running = [asyncio.create_task(client.post(PATH, json=SHORT | {"stream": way})) for way in (False, True)]
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


async def test_what_does_not_finish_in_time_ends_with_an_error(stage: Stage) -> None:
    stop = asyncio.Event()
    async with (
        assembled(config_of(stage, "--drain-seconds", "0.2"), stop) as orchestrator,
        client_of(orchestrator) as client,
    ):
        await until(lambda: orchestrator.is_ready)
        serving = asyncio.create_task(orchestrator.serve(stop))
        running = [asyncio.create_task(client.post(PATH, json=LONG | {"stream": way})) for way in (False, True)]
        await until(lambda: stage.target.num_verified > 4)
        stop.set()
        await serving
        whole, stream = await asyncio.gather(*running)
        assert (whole.status_code, error_of(whole)["code"]) == (503, "unavailable")
        *_, error, done, _ = stream.text.split("\n\n")
        assert done == "data: [DONE]"
        assert "cut off" in json.loads(error.removeprefix("data: "))["error"]["message"]


async def test_a_client_that_hangs_up_ends_the_call_at_the_target(stage: Stage) -> None:
    async with assembled(config_of(stage), asyncio.Event()) as orchestrator, client_of(orchestrator) as client:
        await until(lambda: orchestrator.is_ready)
        stage.target.may_answer.clear()
        for number, is_stream in enumerate((False, True), start=1):
            asking = asyncio.create_task(client.post(PATH, json=LONG | {"stream": is_stream}))
            await until(lambda number=number: len(stage.target.asked) == number)
            asking.cancel()
            await until(lambda number=number: len(stage.target.cancelled) == number)
        await until(lambda: orchestrator.requests.loads().num_requests_running == 0)


async def test_doctor_and_clients_are_told_where_it_is_or_that_it_is_nowhere(stage: Stage) -> None:
    for flags, is_open in (((), True), (("--http-port", "-1"), False)):
        async with (
            assembled(config_of(stage, *flags), asyncio.Event()) as orchestrator,
            Client(f"127.0.0.1:{orchestrator.port}") as client,
        ):
            url = (await client.server_info()).http_url
            assert url.startswith("http://127.0.0.1:") is is_open
            assert bool(url) is is_open


async def test_a_connection_that_comes_as_the_server_leaves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
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
        """Answer nobody."""

    monkeypatch.setattr(server._Protocol, "connection_made", late)
    monkeypatch.setattr(server._HttpServer, "on_tick", noted)
    leaving = asyncio.Event()
    async with server.http_serving("127.0.0.1", 0, nothing, leaving=leaving) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: arrived)
        leaving.set()
        await until(lambda: True in told)  # the connections of then have been told
        arrived[0]()
        async with asyncio.timeout(20.0):  # an idle connection would stay open for a minute
            assert await reader.read() == b""
        writer.close()


async def test_a_handshake_in_progress_ends_no_server(
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
    certificate, key = authority.pair("door").write(tmp_path, "door")
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    config = config_of(stage, "--tls-cert", str(certificate), "--tls-key", str(key))
    async with assembled(config, stop) as orchestrator:
        url = httpx.URL(orchestrator.requests.http_url)
        async with httpx.AsyncClient(base_url=url, verify=context, timeout=60) as client:
            await until(lambda: orchestrator.is_ready)
            serving = asyncio.create_task(orchestrator.serve(stop))
            stage.target.may_answer.clear()
            running = asyncio.create_task(client.post(PATH, json=SHORT))
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
