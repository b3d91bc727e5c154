"""Containers, Kubernetes and systemd: files that their own tools take, with settings that our programs take."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from bough.config.processes import (
    AUTHORITY_VARIABLE,
    CERT_VARIABLE,
    KEY_FILE_VARIABLE,
    TLS_KEY_VARIABLE,
    DraftConfig,
    OrchestratorConfig,
    ServiceConfig,
    TargetConfig,
)
from bough.config.reader import parse, variable
from bough.processes.process import advertised
from bough.registry.connection import read_address
from bough.registry.registry import Quota
from bough.runtime.connections import MAX_CONNECTIONS
from bough.security.access import certificate_files, require_guarded
from deploy.check import check
from deploy.settings import Role

DOCKER, KUBERNETES, SYSTEMD = (Path("deploy") / name for name in ("docker", "kubernetes", "systemd"))
COMPOSE = [DOCKER / "compose.yaml", DOCKER / "compose.gpu.yaml"]
TLS = DOCKER / "compose.tls.yaml"
UNITS = sorted(SYSTEMD.glob("*.service"))
# Of KubeRay 1.7.0's CRD: version v1 without descriptions, and `additionalProperties: false` for all listed fields.
RAY_SERVICE = Path("tests/data/kuberay-rayservice-v1.schema.json.gz")
PROGRAMS: Mapping[str, type[ServiceConfig]] = {
    "target_worker": TargetConfig,
    "draft_worker": DraftConfig,
    "orchestrator": OrchestratorConfig,
}


def tool(name: str) -> str:
    """A program that came with the packages of the extra `dev`."""
    found = shutil.which(name, path=Path(sys.executable).parent)
    assert found is not None
    return found


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Ends within a minute."""
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_dockerfile_follows_the_rules() -> None:
    done = run(tool("hadolint"), str(DOCKER / "Dockerfile"))
    assert done.returncode == 0, done.stdout


def test_the_image_has_all_files_that_are_copied_into_it() -> None:
    """And what is left out of the build's context is not copied."""
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    allowed = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name.removeprefix('./')}" for name in copied} == {line for line in allowed if line.startswith("!")}
    assert all(Path(name).exists() for name in copied)


@pytest.mark.slow
@pytest.mark.parametrize("files", [COMPOSE[:1], COMPOSE, [*COMPOSE, TLS]], ids=["compose", "with GPUs", "with TLS"])
def test_compose_files_are_valid(files: list[Path], tmp_path: Path) -> None:
    command = (tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec")
    done = run(*command, *map(str, files))
    assert done.returncode == 0, done.stdout
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text(COMPOSE[0].read_text().replace("stop_grace_period", "stop_grace_time"))
    assert run(*command, str(misspelt)).returncode != 0


def test_compose_starts_programs_with_valid_settings() -> None:
    services = yaml.safe_load(COMPOSE[0].read_text())["services"]
    for name in ("target", "draft", "orchestrator"):
        service = services[name]
        assert (service["build"]["target"], service["image"]) == (name, f"bough-{name}"), "one image a role"
        module, *flags = service.get("command", dockerfile_command(name))
        environment = service["environment"]
        config = parse(PROGRAMS[module], module, flags, environment)
        mine = variable(module, "")
        assert {key for key in environment if not key.startswith(mine)} == {KEY_FILE_VARIABLE}, "nobody reads others"
        assert config.index_url == "redis://index:6379"
        assert config.worker_key_file == "/etc/bough/worker.key"
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        folders = {volume.rsplit(":", 2)[1] for volume in service["volumes"] if volume.endswith(":ro")}
        assert "/etc/bough" in folders, "a file by itself would be the one of the start, whatever takes its place"
        assert "secrets" not in service
        assert config.open_metrics, "Prometheus has no key"
        assert config.host == "0.0.0.0"
    for name, service in services.items():
        ports = service.get("ports", [])
        assert all(port.startswith("127.0.0.1:") for port in ports), f"{name} is open to other machines"
        for volume in service.get("volumes", []):
            if volume.startswith("."):
                assert (DOCKER / volume.split(":")[0]).exists()


def test_compose_with_tls_has_certificates_and_names_for_every_program() -> None:
    plain, tls = (yaml.safe_load(path.read_text())["services"] for path in (COMPOSE[0], TLS))
    for name, module in (("target", "target_worker"), ("draft", "draft_worker"), ("orchestrator", "orchestrator")):
        environment = plain[name]["environment"] | tls[name]["environment"]
        mine = variable(module, "")
        shared = {key for key in environment if not key.startswith(mine)}
        assert shared == {KEY_FILE_VARIABLE, CERT_VARIABLE, TLS_KEY_VARIABLE, AUTHORITY_VARIABLE}
        config = parse(PROGRAMS[module], module, ["--host", "0.0.0.0"], environment)
        files = certificate_files(config)
        assert files.paths == ("/etc/bough/tls.pem", "/etc/bough/tls.key", "/etc/bough/ca.pem")
        assert advertised(config, 1) == f"{name}:1", "a certificate knows no container by its address"
        assert f"DNS:{name}" in TLS.read_text()
        require_guarded(config)
    overlay = yaml.safe_load((DOCKER / "prometheus.tls.yml").read_text())
    (job,) = overlay["scrape_configs"]
    (found,) = job["http_sd_configs"]
    assert found["url"].startswith("https://orchestrator:8000/")
    assert job["tls_config"] == found["tls_config"] == {"ca_file": "/run/secrets/tls-ca"}
    (volume,) = tls["prometheus"]["volumes"]
    assert volume.split(":")[1] in {each.split(":")[1] for each in plain["prometheus"]["volumes"]}, (
        "it replaces another"
    )
    assert (DOCKER / volume.split(":")[0]).exists()


@pytest.mark.parametrize(
    "path", [COMPOSE[0], SYSTEMD / "bough-index.service", KUBERNETES / "bough.yaml"], ids=lambda path: path.name
)
def test_the_index_has_memory_for_all_that_clients_may_store(path: Path) -> None:
    """It had a quarter of it: many sessions kept workers and orchestrators from registering."""
    found = re.search(r"--maxmemory,? (\d+)gb", path.read_text())
    assert found is not None
    assert int(found[1]) * 1000**3 > 2 * 1.5 * Quota().max_bytes  # strings that grow take more than they hold


def dockerfile_command(stage: str) -> list[str]:
    """The program that a stage starts, and its flags: the words of its CMD after those of an ENTRYPOINT of its own."""
    text = (DOCKER / "Dockerfile").read_text()
    _, _, after = text.partition(f" AS {stage}\n")
    body, _, _ = after.partition("\nFROM ")
    lines = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", body, re.MULTILINE)
    words = [word for line in lines for word in json.loads(line)]
    return words[2:] if words[:2] == ["python", "-m"] else words


def manifests() -> Iterator[dict[str, Any]]:
    """All of Kubernetes'."""
    yield from yaml.safe_load_all((KUBERNETES / "bough.yaml").read_text())


def test_kubernetes_accepts_every_manifest_and_refuses_a_misspelt_one(tmp_path: Path) -> None:
    for number, manifest in enumerate(each for each in manifests() if each["kind"] != "RayService"):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(manifest))
    done = run(tool("kubernetes-validate"), "--strict", *map(str, sorted(tmp_path.iterdir())))
    assert done.returncode == 0, done.stdout + done.stderr
    misspelt = yaml.safe_dump(next(manifests())).replace("selector", "selectors")
    (tmp_path / "0.yaml").write_text(misspelt)
    assert run(tool("kubernetes-validate"), "--strict", str(tmp_path / "0.yaml")).returncode != 0


def test_kuberay_accepts_the_ray_service_and_its_configuration_is_valid() -> None:
    (service,) = (each for each in manifests() if each["kind"] == "RayService")
    validator = jsonschema.Draft202012Validator(json.loads(gzip.decompress(RAY_SERVICE.read_bytes())))
    assert [error.message for error in validator.iter_errors(service)] == []
    service["spec"]["rayClusterConfig"]["headGroupSpecs"] = {}
    assert len(list(validator.iter_errors(service))) == 1
    check(yaml.safe_load(service["spec"]["serveConfigV2"]))


def test_the_stage_that_the_manifest_has_as_a_comment_is_valid() -> None:
    (service,) = (each for each in manifests() if each["kind"] == "RayService")
    text = service["spec"]["serveConfigV2"]
    assert "`stages: 2` in `args`, `port: 7421` above, two replicas" in text
    serve = yaml.safe_load(re.sub(r"^( *)# (- name: Stage|  .*)$", r"\1\2", text, flags=re.MULTILINE))
    (application,) = serve["applications"]
    application["args"]["stages"] = 2
    target, stage, *_ = application["deployments"]
    assert (target["name"], stage["name"]) == ("Target", "Stage")
    target["user_config"]["program"]["port"] = 7421
    check(serve)
    assert target["ray_actor_options"] == stage["ray_actor_options"], "each takes one node of the group"


def test_prometheus_reaches_metrics_on_kubernetes_like_the_guide_describes() -> None:
    guide = Path("docs/deployment.md").read_text()
    settings = {name: yaml.safe_load(value) for name, value in re.findall(r"`(\w*metrics\w*): (\w+)`", guide)}
    assert settings.keys() == {"open_metrics", "metrics_port"}
    (service,) = (each for each in manifests() if each["kind"] == "RayService")
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    for deployment in serve["applications"][0]["deployments"]:
        deployment["user_config"]["program"] |= settings
    check(serve)


def test_every_requested_resource_exists_on_some_node() -> None:
    (service,) = (each for each in manifests() if each["kind"] == "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    wanted = {name for each in application["deployments"] for name in each["ray_actor_options"]["resources"]}
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    there = {name for group in groups for name in json.loads(json.loads(group["rayStartParams"]["resources"]))}
    assert wanted == there


def test_pods_may_take_as_long_to_end_as_their_replicas_to_drain() -> None:
    (service,) = (each for each in manifests() if each["kind"] == "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    groups = {each["groupName"]: each for each in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    for own in application["deployments"]:
        role = Role(own["name"])
        (group,) = (one for name, one in groups.items() if role.value.lower() in name)
        grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace > own.get("graceful_shutdown_timeout_s", role.stop_seconds)


@pytest.mark.parametrize("path", [KUBERNETES / "bough.yaml", Path("deploy") / "cluster.yaml"], ids=str)
def test_clients_spread_over_several_orchestrators(path: Path) -> None:
    """A gRPC connection lasts: the first orchestrator kept all clients, and one that was added later got none."""
    whole = list(yaml.safe_load_all(path.read_text()))
    serve = next(
        (yaml.safe_load(one["spec"]["serveConfigV2"]) for one in whole if one.get("kind") == "RayService"), whole[0]
    )
    (app,) = serve["applications"]
    (own,) = (one for one in app["deployments"] if one["name"] == "Orchestrator")
    assert own.get("num_replicas", 0) > 1 or own["autoscaling_config"]["max_replicas"] > 1
    assert 30 <= own["user_config"]["program"]["max_connection_age"] <= 3600


def test_pods_run_as_an_unprivileged_user() -> None:
    """Neither as root nor with root's capabilities, and without access to Kubernetes' API."""
    (service,) = (each for each in manifests() if each["kind"] == "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    index = next(each for each in manifests() if each["kind"] == "Deployment")["spec"]["template"]["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for spec in [index, *(group["template"]["spec"] for group in groups)]:
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_only_bough_pods_reach_workers_and_index() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in manifests() if each["kind"] == "NetworkPolicy"}
    assert policies.keys() == {"bough", "bough-index"}
    outside = [rule for rule in policies["bough"]["ingress"] if "namespaceSelector" in rule["from"][0]]
    assert {port["port"] for rule in outside for port in rule["ports"]} == {7411, 8000, 8265, 52365}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_every_unit(unit: Path, tmp_path: Path) -> None:
    there = tmp_path / unit.name
    there.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/sh", unit.read_text(), flags=re.MULTILINE))
    done = run("systemd-analyze", "verify", str(there))
    assert (done.returncode, done.stderr) == (0, "")
    there.write_text(there.read_text().replace("Restart=", "Restarts="))
    assert "Unknown key" in run("systemd-analyze", "verify", str(there)).stderr
    exposed = run("systemd-analyze", "security", "--offline=true", "--threshold=50", str(unit))
    assert exposed.returncode == 0, exposed.stdout


@pytest.mark.parametrize("unit", [unit for unit in UNITS if "index" not in unit.stem], ids=lambda unit: unit.stem)
def test_units_start_programs_and_let_them_drain(unit: Path) -> None:
    text = unit.read_text()
    (module,) = re.findall(r"^ExecStart=\S+ -m (\S+)$", text, re.MULTILINE)
    config = parse(PROGRAMS[module], module, ["--model", "m"] if "worker" in module else [], {})
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(seconds) >= config.drain_seconds + 10


@pytest.mark.parametrize("unit", ["bough-target", "bough-draft"])
def test_units_of_workers_can_use_gpus(unit: str) -> None:
    """A rule for any device, which older systemds take ProtectClock for, forbids all others (systemd/systemd#18142)."""
    text = (SYSTEMD / f"{unit}.service").read_text()
    assert not re.findall(r"^(?:ProtectClock|PrivateDevices|DeviceAllow|DevicePolicy)=.*", text, re.MULTILINE)
    assert re.findall(r"^ExecStartPre=-\+/usr/bin/nvidia-modprobe -u -c 0$", text, re.MULTILINE)


def test_orchestrators_have_descriptors_for_all_connections_that_they_accept() -> None:
    """A service has 1,024 by itself, which are 256 clients over gRPC: one that opens as many kept all others out."""
    unit = (SYSTEMD / "bough-orchestrator.service").read_text()
    service = yaml.safe_load(COMPOSE[0].read_text())["services"]["orchestrator"]
    for limit in (*re.findall(r"^LimitNOFILE=(\d+)$", unit, re.MULTILINE), service["ulimits"]["nofile"]):
        assert int(limit) // 4 >= MAX_CONNECTIONS
    assert "LimitNOFILE=" in unit


def test_grafanas_default_password_does_not_work() -> None:
    environment = yaml.safe_load(COMPOSE[0].read_text())["services"]["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert "GF_AUTH_ANONYMOUS_ORG_ROLE" not in environment, "who comes may look"


def test_variables_in_the_guide_are_settings() -> None:
    """Those of docs/deployment.md, unchanged."""
    text = Path("docs/deployment.md").read_text()
    files = re.findall(r"^# /etc/bough/(\w+)\.env\n((?:\w+=.*\n)+)", text, re.MULTILINE)
    assert {name for name, _ in files} == {"index", "target", "draft", "orchestrator"}
    modules = {"target": "target_worker", "draft": "draft_worker", "orchestrator": "orchestrator"}
    for name, lines in files:
        if module := modules.get(name):
            variables = dict(line.split("=", 1) for line in lines.splitlines())
            config = parse(PROGRAMS[module], module, [], variables)
            require_guarded(config)
            assert read_address(config.index_url).password_file == config.worker_key_file
    stage, *head = (dict([pair.split("=")]) for pair in re.findall(r"`(BOUGH_TARGET_\w+=\S+)`", text))
    model = {"BOUGH_TARGET_MODEL": "m"}
    config = parse(TargetConfig, "target_worker", [], model | head[0] | head[1])
    assert config.stages == 2
    assert parse(TargetConfig, "target_worker", [], model | stage).stage_of == f"10.0.0.1:{config.port}"


def test_an_index_of_two_machines_has_a_password() -> None:
    """Without one a server refuses callers that use an address other than loopback, on any interface."""
    unit = (SYSTEMD / "bough-index.service").read_text()
    assert "LoadCredential=index.conf:/etc/bough/index.conf\n" in unit
    assert "valkey-server ${CREDENTIALS_DIRECTORY}/index.conf " in unit
    for guide in ("docs/deployment.md", "docs/clusters.md"):
        assert re.search(r'echo "requirepass \$\(head -n 1 \S*worker\.key\)" > \S*index\.conf', Path(guide).read_text())


def test_the_guide_starts_the_valkey_that_bough_installs() -> None:
    """It named `valkey-server`, which the installation does not put on the path."""
    (command,) = re.findall(r'VALKEY=\$\(python -c "(.+)"\)', Path("docs/clusters.md").read_text())
    assert "Valkey" in run(run(sys.executable, "-c", command).stdout.strip(), "--version").stdout


def test_the_exit_status_reports_health() -> None:
    """Of no process here; of a serving process in tests/health/test_health.py."""
    done = run(sys.executable, "-m", "bough.health", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stdout.startswith("UNAVAILABLE")
