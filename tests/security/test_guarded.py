"""Nothing listens beyond its machine without access control, unless configured."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bough.config.processes import DraftConfig, OrchestratorConfig, TargetConfig
from bough.config.reader import parse
from bough.errors import ConfigError
from bough.processes.process import for_metrics
from bough.security.access import require_guarded
from deploy.settings import DEPLOYMENTS, INDEX, Role, read_program
from orchestrator.assembly import assembled
from tests.fakes.simulated import write_profile

Config = type[TargetConfig | DraftConfig | OrchestratorConfig]
WORKERS = (TargetConfig, DraftConfig)
ELSEWHERE = ("0.0.0.0", "::", "10.0.0.1", "", "bough.example", "127.0.0.1.example")
DEPLOY = Path(__file__).parent.parent.parent / "deploy"


def require(kind: Config, *flags: str) -> None:
    model = [] if kind is OrchestratorConfig else ["--model", "m"]
    require_guarded(parse(kind, "service", [*model, *flags], {}))


@pytest.mark.parametrize("kind", [*WORKERS, OrchestratorConfig])
def test_without_keys_a_process_only_serves_its_own_machine(kind: Config) -> None:
    for host in ("127.0.0.1", "::1", "[::1]", "localhost", "127.9.9.9"):
        require(kind, "--host", host)
    require(kind)
    guard = "--keys FILE or --tls-client-ca" if kind is OrchestratorConfig else "--worker-key-file FILE or --tls-ca"
    for host in ELSEWHERE:
        told = f"--host: must be this machine's own, such as 127.0.0.1, without {guard} FILE, got {host!r}"
        with pytest.raises(ConfigError) as refused:
            require(kind, "--host", host)
        assert str(refused.value).startswith(told)
        assert "--insecure admits everyone who reaches it" in str(refused.value)


@pytest.mark.parametrize("guard", ["--keys", "--tls-client-ca"])
def test_an_orchestrator_with_keys_or_client_certificates_may_be_reachable(guard: str) -> None:
    require(OrchestratorConfig, "--host", "0.0.0.0", guard, "file")
    with pytest.raises(ConfigError, match="--host: must be this machine's own"):  # those of workers keep no client out
        require(OrchestratorConfig, "--host", "0.0.0.0", "--worker-key-file", "file", "--tls-ca", "file")


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize("guard", ["--worker-key-file", "--tls-ca"])
def test_a_worker_with_a_secret_or_an_authority_may_be_reachable(kind: Config, guard: str) -> None:
    require(kind, "--host", "0.0.0.0", guard, "file")


@pytest.mark.parametrize(
    ("kind", "guard"),
    [(TargetConfig, "--worker-key-file"), (DraftConfig, "--tls-ca"), (OrchestratorConfig, "--keys"),
     (OrchestratorConfig, "--tls-client-ca")],
)  # fmt: skip
def test_metrics_of_a_guarded_process_are_only_served_to_its_own_machine(kind: Config, guard: str) -> None:
    model = [] if kind is OrchestratorConfig else ["--model", "m"]
    guarded = parse(kind, "service", [*model, "--host", "10.0.0.1", guard, "file"], {})
    assert for_metrics(guarded).host == "127.0.0.1"
    assert for_metrics(replace(guarded, open_metrics=True)).host == "10.0.0.1"
    assert for_metrics(parse(kind, "service", [*model, "--host", "10.0.0.1"], {})).host == "10.0.0.1"


def test_unencrypted_traffic_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        require(OrchestratorConfig, "--insecure", "--host", "0.0.0.0")
        assert "--insecure: everyone who reaches 0.0.0.0 is admitted" in caplog.text
        require(OrchestratorConfig, "--keys", "file", "--host", "0.0.0.0")
        assert "without --tls-cert keys and texts cross the network to 0.0.0.0 unencrypted" in caplog.text
        caplog.clear()
        require(OrchestratorConfig, "--keys", "file", "--tls-cert", "file", "--host", "0.0.0.0")
        assert caplog.text == ""


async def test_an_unguarded_orchestrator_is_refused_before_it_listens() -> None:
    config = parse(OrchestratorConfig, "o", ["--host", "0.0.0.0", "--index-url", "redis://127.0.0.1:1"], {})
    with pytest.raises(ConfigError, match="without --keys FILE or --tls-client-ca FILE"):
        async with assembled(config, asyncio.Event()):
            pass


async def test_an_unguarded_worker_ends_before_it_listens(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "target_worker", "--simulate", str(write_profile(tmp_path)), "--host", "0.0.0.0"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, told = await process.communicate()
    assert process.returncode == 2
    assert b"error: --host: must be this machine's own" in told


@pytest.mark.parametrize("name", ["cluster.yaml", "two-machines.yaml", "kubernetes/bough.yaml"])
def test_deployments_beyond_one_machine_have_keys(name: str) -> None:
    """Of applications in the configuration, of workers by the variable that its first lines ask for."""
    text = (DEPLOY / name).read_text()
    assert "BOUGH_WORKER_KEY_FILE" in text
    documents = list(yaml.safe_load_all(text))
    if name.startswith("kubernetes"):
        (service,) = (each for each in documents if each["kind"] == "RayService")
        documents = [yaml.safe_load(service["spec"]["serveConfigV2"])]
    (application,) = documents[0]["applications"]
    deployments = {each["name"]: each for each in application["deployments"] if each["name"] != INDEX}
    assert deployments.keys() == {*DEPLOYMENTS} - {INDEX, Role.STAGE.value}
    program = read_program(Role.ORCHESTRATOR, deployments[Role.ORCHESTRATOR.value]["user_config"])
    require(OrchestratorConfig, *program.flags, "--host", "10.0.0.1")
