"""The index under a supervisor: what it keeps, whom it lets in, and that it is found."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from bough.config.addresses import free_port
from bough.errors import ConfigError, Unavailable
from bough.processes.child import Child, open_program
from bough.registry.connection import IndexConnection
from bough.registry.registry import Registry
from bough.security.private_files import write_private
from deploy.index import IndexServer
from deploy.settings import IndexSettings, Role, read_index, read_program
from deploy.supervisor import Supervisor
from tests.fakes.certificates import Authority
from tests.fakes.processes.supervised import HOST, PROFILE, checked_until_it_fails

pytestmark = pytest.mark.pipeline


async def test_an_index_is_supervised(tmp_path: Path) -> None:
    index = IndexServer(IndexSettings(port=free_port(HOST)), HOST)
    try:
        await index.wait()
        await index.check()
        second = IndexServer(IndexSettings(port=int(index.place.url.rpartition(":")[2])), HOST)
        with pytest.raises(ConfigError, match=r"index ended with status 1;(.|\n)*in use"):
            await second.wait()  # although the first one answers there
        index._child.process.kill()
        await asyncio.to_thread(index._child.process.wait)
        with pytest.raises(Unavailable, match="index was killed by SIGKILL"):
            await checked_until_it_fails(index)
    finally:
        await index.stop()


async def test_an_index_that_is_silent_for_a_moment_keeps_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed at the first question without an answer, and with it went what all sessions had recorded."""
    index = IndexServer(IndexSettings(port=free_port(HOST)), HOST)
    try:
        await index.wait()
        process_id = index._child.process.pid
        os.kill(process_id, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="does not answer"):
            await index.check()
        os.kill(process_id, signal.SIGCONT)
        await index.check()
        assert index._child.process.pid == process_id
    finally:
        await index.stop()


async def test_a_full_index_loses_no_lease(tmp_path: Path) -> None:
    """What is full refuses what is new: evicted were workers and sessions, whichever had been used least."""
    index = IndexServer(IndexSettings(port=free_port(HOST)), HOST)
    try:
        await index.wait()
        connection = IndexConnection(index.place.url)
        assert await connection.redis.config_get("maxmemory*") == {
            "maxmemory": str(2048 << 20), "maxmemory-policy": "noeviction", "maxmemory-samples": "5",
            "maxmemory-clients": "0", "maxmemory-eviction-tenacity": "10",
        }  # fmt: skip
        await connection.close()
    finally:
        await index.stop()


async def test_an_index_requires_the_workers_secret(tmp_path: Path) -> None:
    """Also for one that has been put into its file since, while what is there stays."""
    key = tmp_path / "worker.key"
    write_private("key", str(key), "a" * 64)
    index = IndexServer(IndexSettings(port=free_port(HOST), worker_key_file=str(key)), HOST)
    try:
        await index.wait()
        assert all("a" * 64 not in word for word in index._child.command)
        stranger = Registry(index.place.url)
        with pytest.raises(Unavailable, match="authenticate"):
            await stranger.ping()
        await stranger.close()
        program = {"simulate": str(PROFILE), "namespace": "secret", "worker_key_file": str(key)}
        settings = read_program(Role.DRAFT, {"program": program, "log_folder": str(tmp_path)})
        draft = Supervisor(settings, HOST, index.place)
        await draft.start()
        write_private("key", str(key), "b" * 64 + "\n" + "a" * 64)
        await index.check()
        write_private("key", str(key), "b" * 64)
        await index.check()
        newcomer = Registry(index.place.url_for(draft._config), "secret")
        assert [record.address for record in await newcomer.workers()] == [draft.address]
        await newcomer.close()
        await draft.stop()
        with pytest.raises(
            ConfigError, match=r"program\.worker_key_file: missing; must be given, or BOUGH_WORKER_KEY_"
        ):
            Supervisor(read_program(Role.DRAFT, {"program": {"simulate": str(PROFILE)}}), HOST, index.place)
    finally:
        await index.stop()


async def test_an_index_with_certificates_requires_client_certificates(tmp_path: Path) -> None:
    """Over TLS alone, and by whichever certificate its files have now."""
    authority = Authority()
    files = authority.files(tmp_path)
    tls = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.authority}
    index = IndexServer(read_index({"port": free_port(HOST), **tls}), HOST)
    try:
        await index.wait()
        assert index.place.url.startswith("rediss://")
        for url in (
            index.place.url.replace("rediss", "redis"),
            f"{index.place.url}?ssl_ca_certs={files.authority}",
        ):
            stranger = Registry(url)
            with pytest.raises(Unavailable):
                await stranger.ping()
            await stranger.close()
        program = {"simulate": str(PROFILE), "namespace": "tls", **tls}
        settings = read_program(Role.TARGET, {"program": program, "log_folder": str(tmp_path)})
        target = Supervisor(settings, HOST, index.place)
        await target.start()
        authority.pair("process").write(tmp_path, "process")
        await index.check()
        newcomer = Registry(index.place.url_for(target._config), "tls")
        assert [record.address for record in await newcomer.workers()] == [target.address]
        await newcomer.close()
        await target.stop()
        with pytest.raises(ConfigError, match=r"program\.tls_ca: missing; must be given, or BOUGH_TLS_CA set"):
            Supervisor(read_program(Role.TARGET, {"program": {"simulate": str(PROFILE)}}), HOST, index.place)
    finally:
        await index.stop()


async def test_an_index_that_does_not_start_leaves_no_thread_or_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forwards from the TLS port: not if no server could be made or if it ended."""
    files = Authority().files(tmp_path)
    tls = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.authority}
    before = {*threading.enumerate()}
    with socket.create_server((HOST, 0)) as taken:
        index = IndexServer(read_index({"port": taken.getsockname()[1], **tls}), HOST)
        with pytest.raises(ConfigError, match="port: must be free"):
            await index.wait()
        assert index._child.has_ended()

        def fail(*_: object) -> Child:
            raise OSError("no processes are left")

        started = list[Child]()

        def noted(*given: Any) -> Child:
            started.append(open_program(*given))
            return started[0]

        monkeypatch.setattr("deploy.index.open_program", noted)
        monkeypatch.setattr("deploy.index.TlsFront", fail)
        with pytest.raises(OSError, match="no processes"):
            IndexServer(read_index({"port": free_port(HOST), **tls}), HOST)
        assert started[0].has_ended()
        monkeypatch.setattr("deploy.index.open_program", fail)
        with pytest.raises(OSError, match="no processes"):
            IndexServer(read_index({"port": free_port(HOST), **tls}), HOST)
    left = {*threading.enumerate()} - before
    assert not [thread.name for thread in left if thread.name == "tls-front"]


def test_an_index_with_certificates_answers_on_other_event_loops(tmp_path: Path) -> None:
    """Ray's replicas run on uvloop, which comes with ray[serve]."""
    uvloop = pytest.importorskip("uvloop")
    files = Authority().files(tmp_path)
    settings = {"port": free_port(HOST), "tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.authority}

    async def answers() -> None:
        index = IndexServer(read_index(settings), HOST)
        try:
            await index.wait()
            assert index.place.url.startswith("rediss://")
            await index.check()
        finally:
            await index.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(answers())


async def test_an_index_that_others_could_read_is_refused() -> None:
    settings = IndexSettings(host="0.0.0.0", port=free_port(HOST))
    with pytest.raises(ConfigError, match=r"Index\.user_config: --host: must be this machine's own.*got '0\.0\.0\.0'"):
        IndexServer(settings, HOST)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_a_node_may_have_an_ipv6_address(tmp_path: Path, host: str) -> None:
    port = free_port(HOST)
    index = IndexServer(IndexSettings(port=port), host)
    try:
        await index.wait()
        assert index.place.url == f"redis://[::1]:{port}"
        settings = read_program(Role.DRAFT, {"program": {"simulate": str(PROFILE)}, "log_folder": str(tmp_path)})
        draft = Supervisor(settings, host, index.place)
        registry = Registry(index.place.url)
        try:
            await draft.start()
            assert draft.address.startswith("[::1]:")
            assert [record.address for record in await registry.workers()] == [draft.address]
        finally:
            await draft.stop()
            await registry.close()
    finally:
        await index.stop()


async def test_an_index_that_listens_on_all_addresses_is_advertised_by_its_nodes_address() -> None:
    port = free_port(HOST)
    index = IndexServer(IndexSettings(host="0.0.0.0", port=port, insecure=True), HOST)
    try:
        await index.wait()
        assert index.place.url == f"redis://{HOST}:{port}"
        elsewhere = Registry(f"redis://127.0.0.2:{port}")
        await elsewhere.ping()
        await elsewhere.close()
    finally:
        await index.stop()
