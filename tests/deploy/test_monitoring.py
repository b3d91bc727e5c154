"""Prometheus' rules and Grafana's dashboard: they ask for numbers that there are, of processes that really run."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bough.client import Client
from bough.processes.launch import launched
from bough.protocol.generation import GenerateOptions, TextPrompt
from tests.fakes.simulated import simulated_settings, write_profile

FOLDER = Path("deploy/monitoring")
DASHBOARD = FOLDER / "grafana" / "bough.json"
# Debian's package, or where `.ci/run` unpacks it.
TOOLS = f"{Path.home()}/.cache/bough/prometheus/usr/bin"
PROMTOOL, PROMETHEUS = (shutil.which(name) or shutil.which(name, path=TOOLS) for name in ("promtool", "prometheus"))
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
NAME = re.compile(r"\b(?:vllm:|bough_)[a-z0-9_]+")
WAIT_SECONDS = 60


def expressions() -> list[str]:
    """All of the dashboard's, as Prometheus takes them."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [one.replace("$__rate_interval", "10s").replace("$model", ".*") for one in asked]


@pytest.fixture(scope="module")
async def http_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Processes that have answered a request; one of them has been refused."""
    profile = write_profile(tmp_path_factory.mktemp("monitoring"))
    async with (
        launched(simulated_settings(profile, profile), lambda _: None) as cluster,
        Client(cluster.address) as client,
    ):
        await answered(client)
        yield (await client.server_info()).http_url


async def answered(client: Client) -> None:
    """One request from its beginning to its end."""
    async for _ in client.generate(TextPrompt("Once upon"), GenerateOptions(max_tokens=24, ignore_eos=True)):
        pass


def test_the_dashboard_can_be_imported_into_any_grafana() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["datasource"]["uid"] for panel in panels if "targets" in panel} == {"${datasource}"}
    assert [variable["type"] for variable in dashboard["templating"]["list"]] == ["datasource", "query"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places), "panels lie on one another"


@pytest.mark.pipeline
async def test_every_process_reports_its_metrics_address(http_url: str) -> None:
    async with httpx.AsyncClient() as client:
        told = (await client.get(f"{http_url}/service-discovery")).json()
        assert sorted(one["labels"]["kind"] for one in told) == ["draft", "orchestrator", "target"]
        for one in told:
            (address,) = one["targets"]
            assert "vllm:num_requests_running" in (await client.get(f"http://{address}/metrics")).text


@pytest.mark.pipeline
async def test_every_queried_metric_is_reported_by_some_process(http_url: str) -> None:
    async with httpx.AsyncClient() as client:
        told = (await client.get(f"{http_url}/service-discovery")).json()
        texts = [(await client.get(f"http://{one['targets'][0]}/metrics")).text for one in told]
    names = {line.split("{")[0] for text in texts for line in text.splitlines() if not line.startswith("#")}
    rules = (FOLDER / "rules.yml").read_text()
    asked = {name for text in (*expressions(), rules) for name in NAME.findall(text)}
    assert len(asked) > 25
    assert asked - names == set()


async def test_every_metric_of_bough_is_in_the_guide(http_url: str) -> None:
    guide = Path("docs/monitoring.md").read_text()
    async with httpx.AsyncClient() as client:
        told = (await client.get(f"{http_url}/service-discovery")).json()
        texts = [(await client.get(f"http://{one['targets'][0]}/metrics")).text for one in told]
    names = {name for text in texts for name in re.findall(r"^# HELP (bough_\w+)", text, re.MULTILINE)}
    assert {name for name in names if not name.endswith("_created") and not re.search(rf"{name}\b", guide)} == set()


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")],
)
def test_rules_are_valid_for_prometheus_and_fire_as_expected(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([str(PROMTOOL), *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def prometheus(http_url: str, tmp_path: Path) -> Iterator[str]:
    """A real server that has found the processes by itself; yields its URL."""
    config = (FOLDER / "prometheus.yml").read_text().replace("http://127.0.0.1:8000", http_url).replace("15s", "1s")
    shutil.copy(FOLDER / "rules.yml", tmp_path)
    (tmp_path / "prometheus.yml").write_text(config)
    flags = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.listen-address=127.0.0.1:0"]
    command = [str(PROMETHEUS), *flags, "--log.level=info"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            port = next(
                found[1] for line in process.stderr if (found := re.search(r"address=127\.0\.0\.1:([1-9]\d*)", line))
            )
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.mark.pipeline
@needs_prometheus
async def test_a_real_prometheus_has_data_for_every_query_and_rule(http_url: str, prometheus: str) -> None:
    """While requests come: a rate of nothing is no data."""

    async def asked_again_and_again() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            while True:
                body: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 24, "ignore_eos": True}
                (await client.post(f"{http_url}/v1/completions", json=body)).raise_for_status()

    load = asyncio.create_task(asked_again_and_again())
    try:
        async with httpx.AsyncClient(base_url=prometheus) as client, asyncio.timeout(WAIT_SECONDS):
            missing = [*expressions(), *re.findall(r"record: (\S+)", (FOLDER / "rules.yml").read_text())]
            while missing:
                await asyncio.sleep(1)
                missing = [one for one in missing if not await data_for(client, one)]
            groups = (await client.get("/api/v1/rules")).json()["data"]["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    except TimeoutError:
        pytest.fail("\n".join(["no data for", *missing]))
    finally:
        load.cancel()


async def data_for(client: httpx.AsyncClient, expression: str) -> bool:
    """Whether Prometheus has an answer that is not empty."""
    reply = await client.get("/api/v1/query", params={"query": expression})
    return reply.status_code == 200 and bool(reply.json()["data"]["result"])
