"""What `bough doctor --ray` makes of a dashboard's answers, which are Ray 2.60's as far as they are read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bough.cli.inspection.doctor import cluster_problems, doctor, orchestrators, report_cluster
from bough.cli.main import argument_parser
from bough.errors import ConfigError, Unavailable
from bough.health.ray_dashboard import RayDashboard, ray_token

NODES = [
    {"node_ip": "10.0.0.1", "state": "ALIVE", "state_message": None, "resources_total": {"CPU": 4.0, "memory": 1e9}},
    {"node_ip": "10.0.0.2", "state": "DEAD", "state_message": "it was unplugged", "resources_total": {}},
    {"node_ip": "10.0.0.1", "state": "DEAD", "state_message": "before it came back", "resources_total": {}},
]


def deployment(name: str, status: str, message: str, *replicas: dict[str, Any], **program: Any) -> dict[str, Any]:
    return {
        "name": name,
        "status": status,
        "message": message,
        "target_num_replicas": 2,
        "deployment_config": {"user_config": {"program": program}},
        "replicas": [*replicas],
    }


APPLICATIONS = {
    "bough": {
        "status": "DEPLOYING",
        "message": "",
        "deployments": {
            "Orchestrator": deployment(
                "Orchestrator",
                "HEALTHY",
                "",
                {"state": "RUNNING", "node_ip": "10.0.0.1", "pid": 7},
                {"state": "STARTING", "node_ip": "10.0.0.3", "pid": 8},
                port=7411,
            ),
            "Target": deployment("Target", "UPDATING", "no node has target_gpu", {"state": "STARTING"}),
        },
    }
}


class Dashboard(BaseHTTPRequestHandler):
    """Answers as Ray's does; everything else is remembered."""

    token = ""
    put: list[Any]

    def do_GET(self) -> None:
        if self.headers.get("authorization", "") != (f"Bearer {self.token}" if self.token else ""):
            return self.answer(401, "no token")
        if self.path.startswith("/api/v0/nodes"):
            return self.answer(200, json.dumps({"data": {"result": {"result": NODES}}}))
        return self.answer(200, json.dumps({"applications": APPLICATIONS}))

    def do_PUT(self) -> None:
        type(self).put.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.answer(400, "applications: Field required")

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Nothing: a test is quiet."""


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    monkeypatch.setattr(Dashboard, "put", [], raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Dashboard)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_doctor_shows_nodes_replicas_and_problems(dashboard: str, capsys: pytest.CaptureFixture[str]) -> None:
    problems, addresses = await report_cluster(dashboard)
    assert problems == [
        "node 10.0.0.2 is dead: it was unplugged",
        "application bough: Target: no node has target_gpu",
    ], "the node that came back is not missed"
    assert addresses == ["10.0.0.1:7411"], "one that starts is not asked"
    output = capsys.readouterr().out
    assert "node          10.0.0.1, alive; CPU 4\n" in output
    assert "  Orchestrator healthy, 1 of 2 replicas run" in output
    assert "running on 10.0.0.1, process 7" in output
    assert "starting not placed yet" in output


async def test_doctor_queries_the_clusters_orchestrators(dashboard: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argument_parser().parse_args(["doctor", "--ray", "http://127.0.0.1:9", "--address", "127.0.0.1:9"])
    assert await doctor(arguments) == 1
    output = capsys.readouterr().out
    assert "problem: the Ray dashboard at http://127.0.0.1:9 does not answer" in output
    assert "problem: 127.0.0.1:9 does not answer" in output


def test_doctor_queries_an_orchestrator_at_its_configured_host(dashboard: str) -> None:
    applications = RayDashboard(dashboard).applications()
    assert cluster_problems((), ()) == []
    (application,) = applications
    orchestrator = application.deployments[0]
    orchestrator.user_config["program"]["host"] = "127.0.0.1"
    assert orchestrators(applications) == ["127.0.0.1:7411"]
    orchestrator.user_config["program"]["host"] = "::1"
    assert orchestrators(applications) == ["[::1]:7411"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", None])
def test_doctor_queries_an_orchestrator_that_listens_on_all_addresses_at_its_node(
    dashboard: str, host: str | None
) -> None:
    applications = RayDashboard(dashboard).applications()
    applications[0].deployments[0].user_config["program"]["host"] = host
    assert orchestrators(applications) == ["10.0.0.1:7411"]


def test_doctor_reports_errors_of_the_dashboard(dashboard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="400 applications: Field required"):
        RayDashboard(dashboard).deploy({"a": 1})
    assert Dashboard.put == [{"a": 1}]
    monkeypatch.setattr(Dashboard, "token", "secret")
    with pytest.raises(ConfigError, match="401 no token"):
        RayDashboard(dashboard).nodes()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert len(RayDashboard(dashboard).nodes()) == 3
    with pytest.raises(Unavailable, match="does not answer"):
        RayDashboard("http://127.0.0.1:9").nodes()


def test_the_token_is_read_from_the_same_places_as_by_rays_tools(tmp_path: Any) -> None:
    path = tmp_path / "token"
    path.write_text("from a file\n")
    assert ray_token({"RAY_AUTH_TOKEN_PATH": str(path)}) == "from a file"
    assert ray_token({"RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_TOKEN": "mine"}) == "mine"
    assert ray_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}) == ""
