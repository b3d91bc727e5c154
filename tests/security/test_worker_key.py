"""Workers that have a secret answer their own bough's processes alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from bough.client import Client
from bough.config.processes import OrchestratorConfig, TargetConfig, parse
from bough.errors import ConfigError, Unauthenticated
from bough.pb import common_pb2
from bough.processes.launch import Cluster, Settings
from bough.protocol.generation import Finished, GenerateOptions, TextPrompt, WorkerInfo
from bough.rpc.server import is_serving, open_channel
from bough.rpc.services import TARGET, stub_of
from bough.security.access import Access
from bough.security.keys import WorkerKey
from orchestrator.assembly import assembled
from orchestrator.cluster.worker_clients import TargetClient
from tests.fakes.simulated import write_profile

SECRET, OTHER = "0123456789abcdef" * 4, "f" * 64


def secret_file(folder: Path, *secrets: str, name: str = "worker.key") -> Path:
    file = folder / name
    file.touch(0o600)
    file.write_text("".join(f"{secret}\n" for secret in secrets))
    return file


@pytest.mark.parametrize("text", ["", "\n", "short", f"{SECRET}\nshort", "a b" * 20, "é" * 40])
def test_an_invalid_secret_is_refused_without_revealing_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"--worker-key-file: .*must") as refused:
        WorkerKey(str(secret_file(tmp_path, text)))
    assert SECRET not in str(refused.value)


def test_secrets_can_be_changed_one_process_at_a_time(tmp_path: Path) -> None:
    """Each process accepts all lines and shows the first: new at the end, then new first, then new alone."""
    key = WorkerKey(str(file := secret_file(tmp_path, SECRET)))
    shown = [value for _, value in key.credentials]
    key.require(shown)
    for wrong in ([], [f"Bearer {OTHER}"], [f"Bearer {SECRET[:-1]}"], shown * 2):
        with pytest.raises(Unauthenticated):
            key.require(wrong)
    file.write_text(f"{OTHER}\n{SECRET}\n")
    key.file.refresh()
    key.require(shown)
    assert key.credentials == (("authorization", f"Bearer {OTHER}"),)
    file.write_text(f"{OTHER}\n")
    key.file.refresh()
    with pytest.raises(Unauthenticated):
        key.require(shown)


def test_one_variable_names_the_secret_of_all_processes() -> None:
    everywhere = {"BOUGH_WORKER_KEY_FILE": "all"}
    assert parse(OrchestratorConfig, "orchestrator", [], everywhere).worker_key_file == "all"
    own = everywhere | {"BOUGH_ORCHESTRATOR_WORKER_KEY_FILE": "own"}
    assert parse(OrchestratorConfig, "orchestrator", [], own).worker_key_file == "own"
    assert parse(OrchestratorConfig, "orchestrator", ["--worker-key-file", "flag"], own).worker_key_file == "flag"


@asynccontextmanager
async def target_with(folder: Path, cluster: Cluster, key: Path) -> AsyncIterator[str]:
    """A target's process that asks for the secret; its address."""
    command = [sys.executable, "-m", "target_worker", "--simulate", str(write_profile(folder))]
    command += ["--index-url", cluster.index_url, "--worker-key-file", str(key)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(120):
            while b" ready at " not in (told := await process.stderr.readline()):
                assert told, "it ended"
        assert SECRET.encode() not in told
        yield told.decode().rsplit(" ready at ", 1)[1].strip()
    finally:
        os.kill(process.pid, signal.SIGTERM)
        await process.wait()


@pytest.mark.pipeline
async def test_a_target_only_answers_its_own_orchestrator(tmp_path: Path) -> None:
    key = secret_file(tmp_path, SECRET)
    nothing = Settings(parse(TargetConfig, "t", ["--model", "x"], {}), None, parse(OrchestratorConfig, "o", [], {}))
    cluster = Cluster(nothing, tmp_path)
    cluster.start_index()
    try:
        async with target_with(tmp_path, cluster, key) as address:
            await refuses_strangers(address)
            own = TargetClient(address, "t", Access(WorkerKey(str(key))))
            assert isinstance(await own.info(), WorkerInfo)
            await own.close()
            flags = ["--index-url", cluster.index_url, "--draft", "none", "--port", "0", "--http-port", "-1"]
            keyed = parse(OrchestratorConfig, "o", [*flags, "--worker-key-file", str(key)], {})
            async with assembled(keyed, asyncio.Event()) as orchestrator:
                async with Client(f"127.0.0.1:{orchestrator.port}") as client:
                    options = GenerateOptions(max_tokens=3)
                    events = [event async for event in client.generate(TextPrompt("hello"), options)]
                assert isinstance(events[-1], Finished)
            async with assembled(parse(OrchestratorConfig, "o", flags, {}), asyncio.Event()) as stranger:
                assert not stranger.is_ready
    finally:
        cluster.stop_all()


async def refuses_strangers(address: str) -> None:
    """But tells its health."""
    async with open_channel(address) as channel:
        stub = stub_of(TARGET, channel)
        for shown in ((), (("authorization", f"Bearer {OTHER}"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetServerInfo(common_pb2.GetServerInfoRequest(), metadata=shown)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "BOUGH_WORKER_KEY_FILE must have the same key" in (refused.value.details() or "")
            for method in ("Verify", "Release", "GetTokenizer"):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(f"/bough.v1.Target/{method}")(b"", metadata=shown)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await is_serving(channel, "bough.v1.Target", 5.0)
