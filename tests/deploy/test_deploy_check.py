"""The shipped configurations are right, and what is wrong in one is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray")

from bough.errors import ConfigError
from bough.health.ray_dashboard import Node
from deploy.check import check, load, require_resources
from deploy.policies import PerReplica

FOLDER = Path(__file__).parent.parent.parent / "deploy"
FILES = sorted(FOLDER.glob("*.yaml"))
SERVE_FILES = [path for path in FILES if "import_path" in path.read_text()]


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    names = [deployment["name"] for deployment in load(path)["applications"][0]["deployments"]]
    assert {"Target", "Draft", "Orchestrator"} <= {*names}


def test_configurations_for_one_machine_two_and_a_cluster_are_shipped() -> None:
    assert {path.name for path in SERVE_FILES} >= {"one-machine.yaml", "two-machines.yaml", "cluster.yaml"}


def changed(path: str, value: Any) -> dict[str, Any]:
    """cluster.yaml with another value at a path such as applications.0.args.index_url; None takes it out."""
    config: dict[str, Any] = copy.deepcopy(yaml.safe_load((FOLDER / "cluster.yaml").read_text()))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = config
    for part in parents:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return config


DEPLOYMENTS = "applications.0.deployments"
TARGET, DRAFT, ORCHESTRATOR = (f"{DEPLOYMENTS}.{number}" for number in range(3))


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("proxy_locations", "EveryNode", "proxy_locations: no such field; must be left out"),
        ("http_options.prot", 80, r"http_options\.prot: no such field"),
        (f"{TARGET}.num_replica", 2, r"applications\[0\]\.deployments\[0\]\.num_replica: no such field"),
        (f"{TARGET}.ray_actor_options.num_gpu", 1, r"ray_actor_options\.num_gpu: no such field"),
        (f"{DRAFT}.autoscaling_config.max_replica", 3, r"autoscaling_config\.max_replica: no such field"),
        (f"{DRAFT}.autoscaling_config.policy.policy_functions", "x", r"policy\.policy_functions: no such field"),
        (f"{TARGET}.num_replicas", 0, r"num_replicas.*greater than"),
        (f"{TARGET}.user_config.program.modle", "x", r"Target\.user_config\.program\.modle: no such setting"),
        (f"{TARGET}.user_config", None, "Target has no user_config"),
        (f"{DRAFT}.user_config.stall", 3, r"Draft\.user_config\.stall: no such setting"),
        (f"{TARGET}.name", "Targets", "deployments: must be of Target, Draft, Orchestrator"),
        ("applications.0.args.index", "x", r"args\.index: no such setting"),
        (
            f"{TARGET}.graceful_shutdown_timeout_s",
            30,
            r"Target\.graceful_shutdown_timeout_s: must be at least 75, got 30",
        ),
        (f"{TARGET}.num_replicas", "auto", r"Target\.num_replicas: must be a number"),
        (f"{DRAFT}.autoscaling_config.policy.policy_kwargs.metric", "load", "metric: must be one of .*, got 'load'"),
        (f"{DRAFT}.autoscaling_config.policy.policy_kwargs.most", 0, "most: must be a number above 0, got 0"),
        (
            f"{DRAFT}.autoscaling_config.policy.policy_kwargs.metric",
            "requests",
            r"Draft\.autoscaling_config\.policy\.policy_kwargs\.metric: must be calls, .* got requests",
        ),
        (
            f"{ORCHESTRATOR}.autoscaling_config.policy.policy_kwargs.metric",
            "calls",
            r"policy_kwargs\.metric: must be requests, as Orchestrator reports no other, got calls",
        ),
        (
            f"{DRAFT}.autoscaling_config.policy",
            None,
            r"Draft\.autoscaling_config\.policy\.policy_function: missing; must be given",
        ),
        (
            f"{ORCHESTRATOR}.max_replicas_per_node",
            None,
            r"Orchestrator\.max_replicas_per_node: must be 1 .* program\.port is fixed, 7411",
        ),
        (
            f"{TARGET}.user_config.program.metrics_port",
            9400,
            r"Target\.max_replicas_per_node: .*metrics_port is fixed, 9400",
        ),
        (
            TARGET,
            {"name": "Target", "user_config": None},
            r"Target\.user_config: must be a mapping of names to values, got None",
        ),
        (
            f"{TARGET}.user_config.program",
            {"model": None},
            r"Target\.user_config\.program\.model: must be a value, or left out, got None",
        ),
        (
            f"{DRAFT}.autoscaling_config.policy.policy_kwargs",
            None,
            r"policy_kwargs: must be metric and most, got \{\}",
        ),
        (
            f"{DRAFT}.autoscaling_config.policy",
            {"policy_function": "deploy.policies:PerReplica", "policy_kwargs": None},
            r"Draft\.autoscaling_config\.policy\.policy_kwargs: must be a mapping of names to values, got None",
        ),
        (
            f"{DRAFT}.autoscaling_config.policy.policy_kwargs.metrik",
            "calls",
            r"policy_kwargs: must be metric and most, got .*'metrik'",
        ),
        (
            f"{ORCHESTRATOR}.user_config.program.keys",
            None,
            r"http_options\.host: must be this machine's own, .* got 0\.0\.0\.0",
        ),
        (
            f"{ORCHESTRATOR}.user_config.program",
            {"keys": "k", "port": 7411, "tls_cert": "c", "tls_key": "k"},
            r"http_options\.ssl_certfile: missing; must be given, .* with Orchestrator\.user_config\.program\.tls_cert",
        ),
        (
            f"{ORCHESTRATOR}.user_config.program",
            {"keys": "k", "port": 7411, "tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"},
            r"proxy_location: must be Disabled with Orchestrator\.user_config\.program\.tls_client_ca, got EveryNode",
        ),
        (
            f"{TARGET}.ray_actor_options.resources",
            {"gpu": "x"},
            r"Target\.ray_actor_options\.resources: must be numbers",
        ),
        (
            f"{TARGET}.user_config.program.model",
            {"a": 1},
            r"program\.model: must be a value, or left out, got {'a': 1}",
        ),
        (f"{TARGET}.name", "Draft", "deployments: must have Draft once, got it twice"),
        (TARGET, [], r"^applications\[0\]\.deployments\[0\]: must be a mapping of names to values, got \[\]"),
        ("applications.0.import_path", 5, r"^applications\[0\]\.import_path: must be a valid string, got 5$"),
        (f"{DRAFT}.num_replicas", "x", r"deployments\[1\]: `num_replicas` must be an int or .auto.*got: x$"),
        (
            f"{DRAFT}.graceful_shutdown_timeout_s",
            "12",
            r"Draft\.graceful_shutdown_timeout_s: must be at least 40, got 12",
        ),
        (
            f"{ORCHESTRATOR}.graceful_shutdown_timeout_s",
            45,
            r"Orchestrator\.graceful_shutdown_timeout_s: must be at least 615, got 45: the program has 600 s to drain",
        ),
        (
            f"{ORCHESTRATOR}.user_config.program.drain_seconds",
            606,
            r"Orchestrator\.graceful_shutdown_timeout_s: must be at least 621, got 620",
        ),
        (
            f"{ORCHESTRATOR}.user_config.environment",
            {"BOUGH_ORCHESTRATOR_LOOKUP": 0},
            "LOOKUP: .*must be under program",
        ),
    ],
)
def test_a_wrong_setting_is_named(path: str, value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check(changed(path, value))


STAGED = yaml.safe_load((FOLDER / "staged-target.yaml").read_text())


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("Target", {"num_replicas": 2}, r"Target\.num_replicas: must be 1 with args\.stages 2, got 2"),
        ("Stage", {"num_replicas": 3}, r"Stage\.num_replicas: must be 1 with args\.stages 2, got 3"),
        ("Stage", {"num_replicas": "auto"}, r"Stage\.num_replicas: must be 1 with args\.stages 2, got auto"),
        ("Stage", {"autoscaling_config": {"max_replicas": 2}}, r"Stage\.num_replicas: must be a number"),
        (
            "Target",
            {"user_config": {"program": {"model": "m"}}},
            r"Target\.user_config\.program\.port: must be fixed with args\.stages, got 0",
        ),
        (
            "Stage",
            {"user_config": {"program": {"simulate": "two-cores"}}},
            r"Stage\.user_config\.program\.simulate: must be left out with args\.stages, got two-cores",
        ),
        ("Stage", {"name": "Stages"}, r"deployments: must be of .*Target, Stage, Draft.*, got Stages"),
    ],
)
def test_a_wrong_setting_of_a_staged_target_is_named(name: str, change: dict[str, Any], text: str) -> None:
    config = copy.deepcopy(STAGED)
    (deployment,) = (each for each in config["applications"][0]["deployments"] if each["name"] == name)
    deployment |= change
    with pytest.raises(ConfigError, match=text):
        check(config)


def test_stages_are_deployed_only_if_there_are_any() -> None:
    config = copy.deepcopy(STAGED)
    config["applications"][0]["args"]["stages"] = 1
    with pytest.raises(ConfigError, match=r"deployments: must be of .*Target, Draft.*, got Stage"):
        check(config)


def test_a_fixed_port_needs_its_own_node() -> None:
    config = changed(f"{ORCHESTRATOR}.max_replicas_per_node", None)
    program = config["applications"][0]["deployments"][2]["user_config"]["program"]
    program |= {"port": 0, "http_port": -1}
    check(config)
    program["http_port"] = 8080
    with pytest.raises(ConfigError, match=r"program\.http_port is fixed, 8080"):
        check(config)


@pytest.mark.parametrize(
    ("user_config", "text"),
    [
        (None, r"Index\.user_config: must be a mapping of names to values, got None"),
        (
            {"namespace": "x"},
            r"Index\.user_config\.namespace: no such setting; must be one of host, port, memory, worker_key",
        ),
        ({"memory": 256}, r"Index\.user_config\.memory: must be a whole number, 1537 or more, got 256"),
    ],
)
def test_an_index_with_other_settings_is_refused(user_config: Any, text: str) -> None:
    config = yaml.safe_load((FOLDER / "one-machine.yaml").read_text())
    config["applications"][0]["deployments"][0]["user_config"] = user_config
    with pytest.raises(ConfigError, match=text):
        check(config)


@pytest.mark.parametrize(
    ("field", "value"), [("num_replicas", 2), ("autoscaling_config", {"min_replicas": 1, "max_replicas": 2})]
)
def test_there_is_only_one_index(field: str, value: Any) -> None:
    """Each replica sent its programs another index, and all were restarted again and again."""
    config = yaml.safe_load((FOLDER / "one-machine.yaml").read_text())
    config["applications"][0]["deployments"][0][field] = value
    with pytest.raises(
        ConfigError, match=r"^Index\.num_replicas: must be 1, got (2|several): each replica would be a separate index"
    ):
        check(config)


def test_orchestrators_may_be_scaled_by_serves_metrics() -> None:
    check(changed(f"{ORCHESTRATOR}.autoscaling_config.policy", None))


def test_a_port_without_the_proxy_may_require_client_certificates() -> None:
    program = {"keys": "k", "port": 7411, "tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}
    check({**changed(f"{ORCHESTRATOR}.user_config.program", program), "proxy_location": "Disabled"})


def test_an_invalid_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for content, text in (
        (b"a: [", "must be YAML, got: while parsing a flow node expected"),
        (b"\xff", "must be YAML, got: 'utf-8' codec"),
        (b"- a", "must be a mapping"),
        (b"a: 1", "applications: missing; must be given"),
        (b"applications: []\na: 1", "a: no such field"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"^{path}: {text}"):
            load(path)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: must be a readable file, got: No such file"):
        load(tmp_path / "nowhere.yaml")


def test_a_cluster_that_lacks_a_resource_is_refused_with_what_it_has() -> None:
    config = load(FOLDER / "cluster.yaml")
    target = Node("10.0.0.2", True, {"CPU": 8, "GPU": 1, "target_gpu": 1, "memory": 1e9, "node:10.0.0.2": 1})
    draft = Node("10.0.0.3", True, {"CPU": 8, "GPU": 1, "draft_gpu": 1})
    front = Node("10.0.0.1", True, {"CPU": 4, "orchestrator": 2})
    require_resources(config, (front, target, draft))
    for nodes, text in (
        (
            (front, target),
            r"Draft: requests GPU 1, draft_gpu 1; .*\(no node has any draft_gpu\): 10\.0\.0\.1 has CPU 4",
        ),
        ((target, draft), r"Orchestrator: .*10\.0\.0\.2 has CPU 8, GPU 1, target_gpu 1; 10\.0\.0\.3 has"),
        ((front, draft, Node("10.0.0.2", False, target.resources)), "Target: requests"),
        ((front, draft, Node("10.0.0.2", True, {"target_gpu": 1})), r"Target: requests GPU 1.*must be on one node: "),
        ((), "there is no node"),
    ):
        with pytest.raises(ConfigError, match=text):
            require_resources(config, nodes)


def test_a_replica_reserves_one_processor_by_default() -> None:
    """So Serve has it for options that do not say; nodes without one passed, and nothing was ever placed there."""
    without = Node("10.0.0.3", True, {"GPU": 1, "draft_gpu": 1, "target_gpu": 1, "orchestrator": 2})
    other = Node("10.0.0.1", True, {"CPU": 4, "orchestrator": 2})
    config = changed(f"{DRAFT}.ray_actor_options.num_cpus", None)
    with pytest.raises(ConfigError, match=r"^Draft: requests CPU 1, GPU 1, draft_gpu 1; must be on one node: "):
        require_resources(config, (without, other))
    require_resources(changed(f"{DRAFT}.ray_actor_options", None), (without, other))


class Context:
    """What Serve passes to a policy."""

    def __init__(self, metrics: dict[str, dict[str, float]] | None, target_num_replicas: int = 3) -> None:
        self.aggregated_metrics = metrics
        self.target_num_replicas = target_num_replicas


def test_the_number_of_replicas_follows_the_load() -> None:
    policy = PerReplica(metric="calls", most=4)
    assert policy(Context({"calls": {"a": 6.0, "b": 4.0}})) == (2.5, {}), "Serve rounds it up"
    assert policy(Context({"calls": {"a": 0.0}}))[0] == 0
    assert policy(Context({"requests": {"a": 9.0}}))[0] == 3, "nothing is known: as before"
    assert policy(Context(None))[0] == 3
