"""Workers that have a secret answer their own bough's processes alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from bough.client import Client
from bough.config.processes import OrchestratorConfig, TargetConfig, parse
from bough.errors import ConfigError, Unauthenticated
from bough.pb import common_pb2
from bough.processes.worker_process import run_worker
from bough.protocol.generation import Finished, GenerateOptions, TextPrompt, WorkerInfo
from bough.registry.registry import Registry
from bough.rpc.server import is_serving, open_channel
from bough.rpc.services import TARGET, stub_of
from bough.security.access import Access
from bough.security.keys import WorkerKey
from orchestrator.assembly import assembled
from orchestrator.cluster.worker_clients import TargetClient
from target_worker.__main__ import simulated_parts
from tests.fakes.simulated import write_profile
from tests.fakes.waiting import until

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
async def target_with(*flags: str) -> AsyncIterator[str]:
    """A target with these flags; its address."""
    config, stop = parse(TargetConfig, "t", flags, {}), asyncio.Event()
    servicer, load = simulated_parts(config, "t")
    serving = asyncio.create_task(run_worker(config, "target", "t", TARGET, servicer, load, stop))
    registry = Registry(config.index_url, config.namespace)
    try:
        await until(registry.workers)
        yield (await registry.workers())[0].address
    finally:
        await registry.close()
        stop.set()
        await serving


async def test_a_target_only_answers_its_own_orchestrator(
    index_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = secret_file(tmp_path, SECRET)
    secret = ["--worker-key-file", str(key)]
    everywhere = ["--index-url", index_url, "--namespace", "secret", "--port", "0", "--metrics-port", "-1"]
    with caplog.at_level(logging.INFO):
        async with target_with(*everywhere, *secret, "--simulate", str(write_profile(tmp_path))) as address:
            await refuses_strangers(address)
            own = TargetClient(address, "t", Access(WorkerKey(str(key))))
            assert isinstance(await own.info(), WorkerInfo)
            await own.close()
            flags = [*everywhere, "--draft", "none", "--http-port", "-1"]
            keyed = parse(OrchestratorConfig, "o", [*flags, *secret], {})
            async with assembled(keyed, asyncio.Event()) as orchestrator:
                async with Client(f"127.0.0.1:{orchestrator.port}") as client:
                    options = GenerateOptions(max_tokens=3)
                    events = [event async for event in client.generate(TextPrompt("hello"), options)]
                assert isinstance(events[-1], Finished)
            async with assembled(parse(OrchestratorConfig, "o", flags, {}), asyncio.Event()) as stranger:
                assert not stranger.is_ready
    assert " ready at " in caplog.text
    assert SECRET not in caplog.text


async def refuses_strangers(address: str) -> None:
    """But reports its health."""
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
