"""Both APIs with TLS: which clients are answered or refused, how fast, and certificates that change in a stream."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from bough.client import Client
from bough.errors import Unavailable
from bough.health.__main__ import status_of
from bough.protocol.generation import Finished, Started
from bough.registry.records import WorkerRecord
from bough.registry.registry import registered
from bough.security.certificates import CertificateFiles
from orchestrator.assembly import Orchestrator, assembled
from tests.fakes.certificates import Authority, flags_of
from tests.fakes.stage import LONG, PROMPT, SHORT, Stage, config_of, staged
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow  # running services are called
AUTHORITY, STRANGER, CLIENTS = Authority(), Authority("stranger"), Authority("clients")
AT_ONCE_SECONDS = 10.0  # on a machine that is busy; what hangs takes a minute
BODY = {"prompt": "hello", "max_tokens": 3, "temperature": 0}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An orchestrator with a certificate, with a target without: TLS for its two APIs only."""

    stage: Stage
    orchestrator: Orchestrator
    folder: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.orchestrator.port}"

    def client(self, files: CertificateFiles, address: str = "") -> Client:
        return Client(address or self.address, patience_seconds=0.0, certificates=files)

    def http(self, context: ssl.SSLContext, url: str = "") -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=url or self.orchestrator.requests.http_url, verify=context, timeout=30)


@asynccontextmanager
async def endpoint_with(folder: Path, *flags: str) -> AsyncIterator[Endpoint]:
    certificate, key = AUTHORITY.pair("endpoint").write(folder, "endpoint")
    AUTHORITY.write(folder)
    async with staged(folder) as stage:
        config = config_of(stage, "--tls-cert", str(certificate), "--tls-key", str(key), *flags)
        async with assembled(config, asyncio.Event()) as orchestrator:
            await until(lambda: orchestrator.directory.has_target)
            yield Endpoint(stage, orchestrator, folder)


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[Endpoint]:
    async with endpoint_with(tmp_path) as running:
        yield running


def knowing(folder: Path, authority: Authority = AUTHORITY, name: str = "ca") -> CertificateFiles:
    return CertificateFiles(authority=str(authority.write(folder, name)))


def context_of(authority: Authority, *shown: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    if shown:
        context.load_cert_chain(*shown)
    return context


async def answered(client: Client) -> Finished:
    events = [event async for event in client.generate(PROMPT, SHORT)]
    assert isinstance(events[-1], Finished)
    return events[-1]


async def refused(client: Client) -> str:
    """The error that the client gets, at once."""
    began = time.monotonic()
    async with client:
        with pytest.raises(Unavailable) as told:
            await client.models()
    assert time.monotonic() - began < AT_ONCE_SECONDS
    return str(told.value)


async def test_both_apis_answer_over_tls(endpoint: Endpoint, tmp_path: Path) -> None:
    async with endpoint.client(knowing(tmp_path)) as client:
        assert (await answered(client)).usage.completion_tokens == 3
        assert (await client.server_info()).http_url.startswith("https://127.0.0.1:")
    async with endpoint.client(knowing(tmp_path), f"grpcs://{endpoint.address}") as client:
        await answered(client)
    async with endpoint.http(context_of(AUTHORITY)) as http:
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            assert "data: [DONE]" in (await response.aread()).decode()
    assert await status_of(endpoint.address, files=knowing(tmp_path)) == "SERVING"


async def test_a_client_with_wrong_tls_settings_is_refused_with_the_reason_at_once(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    stranger = await refused(endpoint.client(knowing(tmp_path, STRANGER, "stranger")))
    assert "its certificate must be of the authority in --tls-ca (BOUGH_TLS_CA)" in stranger
    plain = await refused(endpoint.client(CertificateFiles()))
    assert "if it speaks TLS, the address must be grpcs://HOST:PORT, or --tls-ca (BOUGH_TLS_CA) must be given" in plain
    await change(endpoint, AUTHORITY, "elsewhere")
    named = await refused(endpoint.client(knowing(tmp_path)))
    assert "its certificate must have the name in the address" in named
    async with endpoint.http(context_of(AUTHORITY)) as http:
        with pytest.raises(httpx.ConnectError, match="IP address mismatch"):
            await http.get("/health")


async def change(endpoint: Endpoint, authority: Authority, *hosts: str) -> None:
    """Puts another certificate in the place of the endpoint's; returns when it is served."""
    pair = authority.pair("endpoint", hosts)
    pair.write(endpoint.folder, "endpoint")
    port = httpx.URL(endpoint.orchestrator.requests.http_url).port
    assert port is not None
    async with asyncio.timeout(AT_ONCE_SECONDS):
        while (await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))).encode() != pair.certificate:
            await asyncio.sleep(0.1)


async def test_plain_http_at_the_https_port_ends_at_once_and_is_logged(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    url = endpoint.orchestrator.requests.http_url.replace("https", "http")
    with caplog.at_level(logging.WARNING):
        async with endpoint.http(context_of(AUTHORITY), url) as http, asyncio.timeout(AT_ONCE_SECONDS):
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                await http.get("/health")
        await until(lambda: "it speaks plain HTTP, but this port serves https://" in caplog.text)


async def test_https_at_the_plain_http_port_ends_at_once(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, assembled(config_of(stage), asyncio.Event()) as orchestrator:
        url = orchestrator.requests.http_url.replace("http", "https")
        async with httpx.AsyncClient(base_url=url, timeout=30) as http, asyncio.timeout(AT_ONCE_SECONDS):
            with pytest.raises(httpx.ConnectError, match=r"WRONG_VERSION_NUMBER|wrong version number|record layer"):
                await http.get("/health")
        address = f"127.0.0.1:{orchestrator.port}"
        told = await refused(Client(address, patience_seconds=0.0, certificates=knowing(tmp_path)))
        assert (
            "it does not speak TLS: the address must have no grpcs://, and --tls-ca (BOUGH_TLS_CA) must not be given"
            in told
        )


async def test_handshakes_are_limited_in_number_and_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bough.runtime.connections.MAX_CONNECTIONS", 2)
    monkeypatch.setattr("bough.security.tls.HANDSHAKE_SECONDS", 2.0)
    async with endpoint_with(tmp_path) as endpoint, endpoint.http(context_of(AUTHORITY)) as http:
        port = httpx.URL(endpoint.orchestrator.requests.http_url).port
        assert port is not None
        with caplog.at_level(logging.WARNING):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            async with asyncio.timeout(AT_ONCE_SECONDS):
                ended = await asyncio.gather(*(reader.read() for reader, _ in silent), return_exceptions=True)
        assert len(ended) == 3
        assert "2 connections are open, the limit: closing the one that has been idle longest" in caplog.text
        assert caplog.text.count("SSL handshake is taking longer than 2.0 seconds") == 2
        assert (await http.get("/health")).status_code == 200
        for _, writer in silent:
            writer.close()


async def test_clients_without_a_certificate_are_refused_if_one_is_required(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    clients = CLIENTS.write(theirs)
    async with endpoint_with(tmp_path, "--tls-client-ca", str(clients)) as endpoint:
        shown, strange = CLIENTS.pair("app", []).write(theirs, "app"), STRANGER.pair("app").write(theirs, "strange")
        known = knowing(tmp_path)
        async with endpoint.client(replace(known, cert=str(shown[0]), key=str(shown[1]))) as client:
            await answered(client)
        async with endpoint.http(context_of(AUTHORITY, *shown)) as http:
            assert (await http.get("/health")).status_code == 200
        asked = "if it requires a certificate, also --tls-cert and --tls-key"
        assert asked in await refused(endpoint.client(known))
        assert asked in await refused(endpoint.client(replace(known, cert=str(strange[0]), key=str(strange[1]))))
        with caplog.at_level(logging.WARNING):
            for context in (context_of(AUTHORITY), context_of(AUTHORITY, *strange)):
                async with endpoint.http(context) as http:
                    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                        await http.get("/health")
            await until(lambda: "it has no certificate, but --tls-client-ca requires one" in caplog.text)


async def test_a_certificate_can_be_replaced_during_a_stream(endpoint: Endpoint, tmp_path: Path) -> None:
    """The stream continues; the next connection has the new one, of another authority."""
    endpoint.stage.target.sweep_seconds = 0.02
    shown = context_of(AUTHORITY)
    async with endpoint.client(knowing(tmp_path)) as client, endpoint.http(shown) as http:
        stream = client.generate(PROMPT, LONG)
        assert isinstance(await anext(stream), Started)
        async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True, "max_tokens": 9000}) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await change(endpoint, STRANGER, "127.0.0.1")
            for _ in range(20):
                await anext(stream)
                await anext(lines)
        await stream.aclose()
    new = knowing(tmp_path, STRANGER, "stranger")
    async with endpoint.client(new) as client, endpoint.http(context_of(STRANGER)) as http:
        await answered(client)
        assert (await http.get("/health")).status_code == 200
    await refused(endpoint.client(knowing(tmp_path)))


async def test_a_client_reads_a_new_authority_after_a_failure(endpoint: Endpoint, tmp_path: Path) -> None:
    files = knowing(tmp_path)
    async with endpoint.client(files) as client:
        await client.models()
        await change(endpoint, STRANGER, "127.0.0.1")
        STRANGER.write(tmp_path)
        async with Client("127.0.0.1:1", endpoint.address, patience_seconds=0.0, certificates=files) as other:
            assert await other.models()


async def test_workers_are_only_called_over_tls_if_there_is_an_authority(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stage's target speaks plain text: an orchestrator with --tls-ca does not send it anything."""
    files = AUTHORITY.files(tmp_path)
    async with staged(tmp_path) as stage:
        async with assembled(config_of(stage, *flags_of(files)), asyncio.Event()) as orchestrator:
            with caplog.at_level(logging.WARNING):
                await until(lambda: "target-fake is registered at" in caplog.text)
            assert not orchestrator.directory.has_target
            assert "it does not speak TLS" in caplog.text
        assert stage.target.asked == []


async def test_metrics_are_served_over_tls_and_found_there(tmp_path: Path) -> None:
    """A silent one delays nobody; plain text ends at once; the certificate is the present one."""
    async with endpoint_with(tmp_path, "--metrics-port", "0") as endpoint, endpoint.http(context_of(AUTHORITY)) as http:
        record = WorkerRecord("orchestrator", "o", endpoint.address, metrics=endpoint.orchestrator.metrics_address)
        async with registered(endpoint.stage.registry, lambda: record):
            found = (await http.get("/service-discovery")).json()
        (url,) = [f"{each['labels']['__scheme__']}://{each['targets'][0]}/metrics" for each in found]
        assert url == endpoint.orchestrator.requests.metrics_url
        host, port = httpx.URL(url).host, httpx.URL(url).port
        assert port is not None
        silent = [await asyncio.open_connection(host, port) for _ in range(10)]
        assert "vllm:num_requests_running" in (await http.get(url)).text
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await http.get(url.replace("https", "http"))
        STRANGER.pair("endpoint").write(endpoint.folder, "endpoint")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            async with endpoint.http(context_of(AUTHORITY)) as late:
                await late.get(url)
        for _, writer in silent:
            writer.close()
