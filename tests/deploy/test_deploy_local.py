"""`make serve`: that it starts a Ray node of its own, outlives hiccups of Serve's controller, and ends by a signal."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayError
from ray.serve._private import haproxy
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ServeDeploySchema, ServeStatus

from bough.config.addresses import free_port, require_free_ports
from bough.errors import ConfigError, Unavailable
from bough.processes.child import STOP_SECONDS as KILL_AFTER_SECONDS
from deploy import local
from deploy.check import check, load
from deploy.local import Endpoints
from deploy.settings import REPLICA_ENDING_SECONDS
from tests.fakes.waiting import block_until

CONFIG = load(Path(__file__).parent.parent.parent / "deploy" / "one-machine.yaml")
FAILED = ApplicationStatusOverview(
    status=ApplicationStatus.DEPLOY_FAILED, message="there is no such model", last_deployed_time_s=0.0, deployments={}
)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`local.watch`, where Serve's answers are given in turn; an error is raised."""

    def watch(*answers: Any) -> None:
        given = iter(answers)

        def status() -> ServeStatus:
            if isinstance(answer := next(given), Exception):
                raise answer
            return ServeStatus(applications=answer)

        monkeypatch.setattr(local.ray.serve, "status", status)
        local.watch(Endpoints.of(CONFIG), "http://127.0.0.1:8265")

    monkeypatch.setattr(local, "POLL_SECONDS", 0.0)
    return watch


def test_one_missing_answer_of_the_controller_ends_nothing(
    serve: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="bough: there is no such model"):
        serve(RayError("a hiccup"), {}, {"bough": FAILED})
    assert capsys.readouterr().err == (
        "waiting: Serve's controller (a hiccup)\nwaiting: Serve to accept the application\n"
    )


def test_a_configuration_refused_by_serve_gives_one_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Waiting for Serve is reported when it begins, as it takes long on a busy machine."""

    def refuse(schema: ServeDeploySchema) -> None:
        raise RayError(f"Traceback:\nValueError: {schema.applications[0].name} is taken")

    monkeypatch.setattr(local.ray.serve, "start", lambda **_: None)
    monkeypatch.setattr(local, "_get_global_client", lambda: SimpleNamespace(deploy_apps=refuse))
    with pytest.raises(Unavailable, match=r"^Serve does not accept the configuration: ValueError: bough is taken$"):
        local.deploy(CONFIG)
    assert capsys.readouterr().err == "waiting: Serve to accept the application\n"


def test_deploy_joins_no_other_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address Ray joins what RAY_ADDRESS names, and does not accept its node's resources."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(local.ray, "init", lambda **options: started.append(options))
    monkeypatch.setattr(local.ray, "shutdown", lambda: None)
    monkeypatch.setattr(local, "catch_signals", lambda: None)
    monkeypatch.setattr(local, "_stop", lambda: None)
    with local.ray_node(CONFIG, 8265):
        pass
    assert [options["address"] for options in started] == ["local"]


def test_replicas_drain_even_if_ctrl_c_has_ended_the_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal's Ctrl-C goes to all processes of its group, and Ray's dashboard takes it."""
    patience: list[float] = []

    class Controller:
        def shutdown(self, timeout_s: float) -> None:
            patience.append(timeout_s)
            raise local.Stopped  # a second Ctrl-C

    for client in (None, Controller()):  # None: nothing has been deployed yet
        monkeypatch.setattr(local, "_get_global_client", lambda client=client, **_: client)
        local._stop()
    assert patience == [local.STOP_SECONDS]


@pytest.fixture
def caught() -> Iterator[Callable[[], None]]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield local.catch_signals
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_during_an_asyncio_callback_is_not_lost(caught: Callable[[], None]) -> None:
    """asyncio logs an Exception that a callback raises, and continues."""

    async def ask() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.2)

    caught()
    with pytest.raises(local.Stopped):
        asyncio.run(ask())


def test_an_unknown_profile_and_a_port_in_use_are_named_before_anything_starts(
    caught: Callable[[], None],
) -> None:
    file = Path(__file__).parent.parent.parent / "deploy" / "one-machine.yaml"
    with pytest.raises(ConfigError, match="profile: must be a JSON file, or one of a100"):
        local.run(file, "rtx9999", None, 0)
    with pytest.raises(ConfigError, match=r"--port .*: must be a whole number, -1 to 65535, got 99999"):
        local.run(file, "l40-70b-4bit", 99999, 0)
    with socket.socket() as other:
        other.bind((local.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"--port \(or http_options.port\): must be a free port of .*, got {port}"
        ):
            local.run(file, "l40-70b-4bit", port, 0)


def test_a_missing_gpu_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once the answer came after minutes, as a whole Ray node had to be started to find out."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ports = set[int]()
    while len(ports) < 3:  # they are drawn by chance, and two may be the same
        ports.add(free_port(local.HOST))
    own, http, index_port = ports
    config = with_orchestrator(port=own) | {"http_options": {"host": local.HOST, "port": http}}
    index, target = config["applications"][0]["deployments"][:2]
    index["user_config"]["port"] = index_port
    (file := tmp_path / "serve.yaml").write_text(json.dumps(config))
    monkeypatch.setattr(local, "catch_signals", lambda: None)
    monkeypatch.setattr(local, "ensure_demonstration", lambda: None)
    started: list[Any] = []
    monkeypatch.setattr(local.ray, "init", lambda **options: started.append(options))
    monkeypatch.setattr(local.ray, "shutdown", lambda: None)
    monkeypatch.setattr(local, "_stop", lambda: None)
    monkeypatch.setattr(local, "deploy", lambda *_: None)
    monkeypatch.setattr(local, "watch", lambda *_: None)
    local.run(file, "", None, 0)
    assert len(started) == 1, "what asks for no GPU is served"
    target["ray_actor_options"]["num_gpus"] = 1
    file.write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"Target: requests GPU 1, target_gpu 1; .*\(no node has any GPU\): 127\.0\.0\.1 has CPU"
    ):
        local.run(file, "", None, 0)
    assert len(started) == 1


def test_haproxy_requires_its_program_free_ports_and_no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would say each in a log alone, with no HTTP port open."""
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(ConfigError, match=r"RAY_SERVE_ENABLE_HA_PROXY: must be 0 with http_options\.ssl_certfile"):
        check(CONFIG | {"http_options": {"host": "127.0.0.1", "ssl_certfile": "c.pem", "ssl_keyfile": "c.key"}})
    check(CONFIG)
    monkeypatch.setattr(haproxy, "RAY_SERVE_HAPROXY_BINARY_PATH", "/nowhere/haproxy")
    with pytest.raises(ConfigError, match=r"must have an HAProxy to run: .*'/nowhere/haproxy'"):
        local.end_haproxy_with_ray()
    with socket.socket() as other:
        other.bind((local.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", str(port))
        config = with_orchestrator(port=0) | {"http_options": {"port": 0}}
        config["applications"][0]["deployments"][0]["user_config"]["port"] = 0
        with pytest.raises(ConfigError, match=f"RAY_SERVE_HAPROXY_STATS_PORT: must be a free port of .*, got {port}"):
            require_free_ports(local.HOST, local.ports_of(config, 0))


def test_haproxy_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a Ray node is killed, Ray's own HAProxy continues and occupies the ports."""
    for name in ("BOUGH_HAPROXY", "BOUGH_PYTHON", "RAY_SERVE_HAPROXY_BINARY_PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(haproxy, "RAY_SERVE_HAPROXY_BINARY_PATH", shutil.which("sleep"))
    local.end_haproxy_with_ray()
    started = ["sh", "-c", '"$RAY_SERVE_HAPROXY_BINARY_PATH" 60 & echo $!; wait']
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as ray:
        assert ray.stdout is not None
        name = Path(f"/proc/{ray.stdout.readline().strip()}/comm")
        block_until(lambda: name.read_text() == "sleep\n")
        ray.kill()
        is_closed, _, _ = select.select([ray.stdout], [], [], 30.0)  # its end closes the last copy of the pipe
        assert is_closed


def with_orchestrator(**program: Any) -> dict[str, Any]:
    """The configuration of one machine with other settings of the orchestrator."""
    config = copy.deepcopy(CONFIG)
    config["applications"][0]["deployments"][3]["user_config"]["program"] |= program
    return config


def test_printed_calls_have_the_required_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_TLS_CERT", "c.pem")
    monkeypatch.setenv("BOUGH_TLS_KEY", "c.key")
    monkeypatch.setenv("BOUGH_TLS_CA", "ca.pem")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    config = with_orchestrator(keys="keys.jsonl")
    local.adapt(config, "", 8443)
    assert config["http_options"] | {"host": ""} == {
        "host": "", "port": 8443, "ssl_certfile": "c.pem", "ssl_keyfile": "c.key",
    }  # fmt: skip
    said = Endpoints.of(config).how_to_ask("http://127.0.0.1:8265")
    for call in (
        "ready; with your API key in BOUGH_API_KEY, three ways to ask, from another terminal:",
        "curl https://127.0.0.1:8443/v1/chat/completions --cacert ca.pem "
        '-H "Authorization: Bearer $BOUGH_API_KEY" -H \'Content-Type',
        "SSL_CERT_FILE=ca.pem python -c '",
        'OpenAI(base_url="https://127.0.0.1:8443/v1", api_key=os.environ["BOUGH_API_KEY"])',
        'bough generate --address 127.0.0.1:7411 --tls-ca ca.pem "Why',
        "bough doctor --address 127.0.0.1:7411 --tls-ca ca.pem --ray http://127.0.0.1:8265",
    ):
        assert call in said
    own = with_orchestrator(tls_client_ca="clients.pem", http_port=8001) | {"proxy_location": "Disabled"}
    said = Endpoints.of(own).how_to_ask("")
    assert "curl https://127.0.0.1:8001/v1/chat/completions --cacert ca.pem --cert c.pem --key c.key -H" in said
    assert "openai" not in said, "it takes a client of httpx for that"


def test_addresses_that_clients_could_not_reach_are_refused() -> None:
    for program in ({"port": 0}, {"http_port": 0}):
        (name,) = program
        with pytest.raises(ConfigError, match=rf"Orchestrator\.user_config\.program\.{name}: must be fixed, .*got 0"):
            Endpoints.of(with_orchestrator(**program) | {"proxy_location": "Disabled"})


def test_a_port_given_twice_or_to_no_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's proxy and the orchestrator would meet there, after minutes of `make serve`."""
    config = with_orchestrator(port=0) | {"http_options": {"port": 0}}
    index = config["applications"][0]["deployments"][0]["user_config"]
    index["port"] = port = free_port(local.HOST)
    require_free_ports(local.HOST, local.ports_of(config, 0))
    named = rf"^--port \(or http_options\.port\): must be another port than --dashboard-port, got {port} for both"
    with pytest.raises(ConfigError, match=named):
        require_free_ports(local.HOST, local.ports_of(config | {"http_options": {"port": port}}, port))
    twice = with_orchestrator(port=0, metrics_port=port) | {"http_options": {"port": 0}}
    twice["applications"][0]["deployments"][0]["user_config"]["port"] = port
    named = r"^Orchestrator\.user_config\.program\.metrics_port: must be another port than Index\.user_config\.port"
    with pytest.raises(ConfigError, match=named):
        require_free_ports(local.HOST, local.ports_of(twice, 0))
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_METRICS_PORT", "many")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", "0")
    with pytest.raises(ConfigError, match=r"^RAY_SERVE_HAPROXY_METRICS_PORT: must be a whole number, .*got 'many'"):
        require_free_ports(local.HOST, local.ports_of(config, 0))
    own = with_orchestrator(http_port=8000) | {"proxy_location": "Disabled"}
    with pytest.raises(ConfigError, match=r"^--port: must be left out with proxy_location: Disabled, got 9000; Orch"):
        local.adapt(own, "", 9000)


def test_the_port_of_serves_proxy_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^http_options\.port: must be fixed, .*got 0"):
        Endpoints.of(CONFIG | {"http_options": {"port": 0}})


@pytest.mark.parametrize(("given", "seconds"), [({}, local.DRAIN_SECONDS), ({"drain_seconds": 50}, 50)])
def test_ctrl_c_waits_for_all_replicas_together(given: dict[str, Any], seconds: float) -> None:
    config = copy.deepcopy(CONFIG)
    (own,) = (each for each in config["applications"][0]["deployments"] if each["name"] == "Orchestrator")
    own["user_config"]["program"] |= given
    del own["user_config"]["program"]["host"]  # it listened on its node's address, and was waited for at 127.0.0.1
    local.adapt(config, "", None)
    assert own["user_config"]["program"] == {"host": local.HOST, "port": 7411, "drain_seconds": seconds}
    assert local.DRAIN_SECONDS + REPLICA_ENDING_SECONDS + KILL_AFTER_SECONDS <= local.STOP_SECONDS


def test_workers_without_weights_stay_supervised() -> None:
    config = copy.deepcopy(CONFIG)
    config["applications"][0]["deployments"][1]["user_config"]["program"]["worker_key_file"] = "worker.key"
    local.adapt(config, "l40-70b-4bit", None)
    target = config["applications"][0]["deployments"][1]["user_config"]["program"]
    assert target == {"host": local.HOST, "worker_key_file": "worker.key", "simulate": "l40-70b-4bit"}


def test_a_node_that_does_not_start_is_reported_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own exceptions ended the command with a traceback; nothing that it has started is left."""
    ended: list[bool] = []

    def late(**options: Any) -> None:
        raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr(local.ray, "init", late)
    monkeypatch.setattr(local.ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(Unavailable, match=r"^the Ray node did not start: The current node timed out during startup\.$"):
        local.ray_node(CONFIG, 8265).__enter__()
    assert ended == [True]


def test_a_node_that_ray_would_not_start_gives_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("not enough memory")

    monkeypatch.setattr(local.ResourceAndLabelSpec, "resolve", refuse)
    with pytest.raises(Unavailable, match="the Ray node would not start: not enough memory"):
        local.node_to_be(CONFIG)
