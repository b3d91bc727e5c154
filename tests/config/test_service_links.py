"""What Kubernetes puts into the environment for Services named like our processes is none of our settings."""

from __future__ import annotations

import pytest

from bough.config.processes import DraftConfig, OrchestratorConfig, TargetConfig, parse
from bough.errors import ConfigError


def service(name: str, host: str, port: int, port_name: str = "", protocol: str = "tcp") -> dict[str, str]:
    """All that a container has of a Service, in the order of kubelet's source (pkg/kubelet/envvars)."""
    prefix = name.upper().replace("-", "_")
    url = f"{protocol}://[{host}]:{port}" if ":" in host else f"{protocol}://{host}:{port}"
    link = f"{prefix}_PORT_{port}_{protocol.upper()}"
    named = {f"{prefix}_SERVICE_PORT_{port_name.upper()}": str(port)} if port_name else {}
    return {
        f"{prefix}_SERVICE_HOST": host,
        f"{prefix}_SERVICE_PORT": str(port),
        **named,
        f"{prefix}_PORT": url,
        link: url,
        f"{link}_PROTO": protocol,
        f"{link}_PORT": str(port),
        f"{link}_ADDR": host,
    }


SERVICES = {
    **service("bough-orchestrator", "10.0.0.1", 7411, "grpc"),
    **service("bough-orchestrator-metrics", "10.0.0.2", 9100, "http_metrics"),  # whose _PORT is a setting's name too
    **service("bough-draft", "fd00::7", 7412),
    **service("bough-target", "10.0.0.3", 7413, protocol="sctp"),
    **service("bough-target-0", "10.0.0.4", 7413),
    **service("bough-index", "10.0.0.5", 6379),
    **service("bough-target-service", "10.0.0.8", 7413, "grpc"),
    **service("bough", "10.0.0.6", 80),
    **service("kubernetes", "10.96.0.1", 443, "https"),
}


def test_every_process_starts_despite_variables_of_kubernetes_services() -> None:
    assert parse(OrchestratorConfig, "orchestrator", [], SERVICES) == OrchestratorConfig()
    assert parse(DraftConfig, "draft_worker", ["--model", "m"], SERVICES) == DraftConfig(model="m")
    assert parse(TargetConfig, "target_worker", ["--model", "m"], SERVICES) == TargetConfig(model="m")


def test_settings_are_read_despite_variables_of_kubernetes_services() -> None:
    environ = SERVICES | {"BOUGH_ORCHESTRATOR_PORT": "7500", "BOUGH_ORCHESTRATOR_METRICS_PORT": "-1"}
    config = parse(OrchestratorConfig, "orchestrator", [], environ)
    assert (config.port, config.metrics_port) == (7500, -1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BOUGH_ORCHESTRATOR_PROT", "7411"),
        ("BOUGH_ORCHESTRATOR_PORTS", "tcp://10.0.0.1:7411"),
        ("BOUGH_ORCHESTRATOR_SERVICE_NAME", "10.0.0.1"),
        ("BOUGH_ORCHESTRATOR_PORT", "http://10.0.0.1:7411"),
        ("BOUGH_ORCHESTRATOR_PORT_GRPC_TCP", "tcp://10.0.0.1:7411"),
        ("BOUGH_ORCHESTRATOR_HOSTS", "10.0.0.1"),
    ],
)
def test_variables_that_only_resemble_service_links_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: "):
        parse(OrchestratorConfig, "orchestrator", [], {name: value})
