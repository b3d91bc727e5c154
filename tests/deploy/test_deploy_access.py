"""Programs with keys and certificates under a supervisor: it reaches them, and nobody else does through it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray")

from starlette.applications import Starlette
from starlette.routing import Route

from bough.client import Client
from bough.errors import ConfigError, Unauthenticated
from deploy.app import OrchestratorReplica, Supervising
from deploy.settings import Role
from tests.fakes.certificates import Authority
from tests.fakes.processes.supervised import PROFILE, supervised

pytestmark = pytest.mark.pipeline


async def test_programs_with_certificates_are_supervised_and_reached(index_url: str, tmp_path: Path) -> None:
    """Serve's proxy reaches the orchestrator over https, also after a certificate changes."""
    authority = Authority()
    files = authority.files(tmp_path)
    tls = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.authority, "namespace": "tls"}
    async with (
        supervised(Role.TARGET, index_url, tmp_path, {"simulate": str(PROFILE), **tls}) as target,
        supervised(Role.ORCHESTRATOR, index_url, tmp_path, {**tls, "port": 0, "draft": "none"}) as orchestrator,
    ):
        forwarder = orchestrator.forwarder()
        assert forwarder is not None
        app = Starlette(routes=[Route("/{path:path}", forwarder.forward, methods=["GET"])])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            async with asyncio.timeout(30):
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.1)
            authority.pair("process").write(tmp_path, "process")
            for _ in range(3):
                await asyncio.sleep(1)
                await target.check()
                await orchestrator.check()
                assert (await client.get("/v1/models")).status_code == 200
        assert (await target.info()).kind == "target"
        assert (await orchestrator.loads()).num_requests_total == 0
        await forwarder.close()


async def test_the_proxy_is_refused_by_a_port_that_requires_client_certificates(index_url: str, tmp_path: Path) -> None:
    """It let in callers without one, as Serve's proxy asks for none, and its supervisor presented its own."""
    files = Authority().files(tmp_path)
    clients = {"tls_client_ca": str(Authority("clients").write(tmp_path, "clients")), "port": 0, "draft": "none"}
    own = {"tls_cert": files.cert, "tls_key": files.key, "namespace": "clients"}
    async with supervised(Role.ORCHESTRATOR, index_url, tmp_path, {**own, **clients}) as orchestrator:
        assert orchestrator.forwarder() is None
        await orchestrator.check()
        assert (await orchestrator.loads()).num_requests_total == 0


async def test_an_orchestrator_reports_its_load_to_its_supervisor(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a secret of all processes it answered applications alone, and was never scaled."""
    monkeypatch.delattr(Supervising, "__del__")  # which Serve awaits, and nothing does here
    (keys := tmp_path / "keys.jsonl").write_text("")
    keys.chmod(0o600)
    program = {"keys": str(keys), "port": 0, "draft": "none", "namespace": "keys"}
    async with supervised(Role.ORCHESTRATOR, index_url, tmp_path, program) as orchestrator:
        replica = OrchestratorReplica(index_url, [])
        replica._supervisor = orchestrator
        assert await replica.record_autoscaling_stats() == {"requests": 0.0}
        async with Client(orchestrator.address, patience_seconds=0.0) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.loads()
        own_key = orchestrator._config.worker_key_file
        assert Path(own_key).stat().st_mode & 0o777 == 0o600
    assert not Path(own_key).exists()


async def test_a_program_uses_its_nodes_environment(
    index_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor did not, and was refused by a program with keys of which it knew nothing."""
    (keys := tmp_path / "keys.jsonl").write_text("")
    keys.chmod(0o600)
    monkeypatch.setenv("BOUGH_ORCHESTRATOR_KEYS", str(keys))
    program = {"port": 0, "draft": "none", "namespace": "variables"}
    async with supervised(Role.ORCHESTRATOR, index_url, tmp_path, program) as orchestrator:
        assert (await orchestrator.loads()).num_requests_total == 0
    monkeypatch.setenv("BOUGH_ORCHESTRATOR_KEYZ", "x")
    with pytest.raises(ConfigError, match="BOUGH_ORCHESTRATOR_KEYZ: no such setting"):
        async with supervised(Role.ORCHESTRATOR, index_url, tmp_path, program):
            pass


async def test_a_worker_that_would_not_answer_its_supervisor_is_refused(index_url: str, tmp_path: Path) -> None:
    """It was taken for silent and ended, again and again."""
    files = Authority().files(tmp_path, "worker")
    tls = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.authority, "tls_peer_names": "orchestrator"}
    program = {"simulate": str(PROFILE), "namespace": "names", **tls}
    with pytest.raises(
        ConfigError, match=r"program\.tls_peer_names: must name its own certificate, .*, got orchestrator"
    ):
        async with supervised(Role.DRAFT, index_url, tmp_path, program):
            pass
    async with supervised(Role.DRAFT, index_url, tmp_path, {**program, "tls_peer_names": "orchestrator,worker"}):
        pass
