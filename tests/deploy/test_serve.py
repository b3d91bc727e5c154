"""`make serve`: the calls that it prints work as pasted; with keys and certificates everywhere, no others do."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray")

from bough.client import Client
from bough.config.addresses import free_port
from bough.registry.registry import Registry
from bough.security.keys import hash_of, new_key
from bough.security.private_files import write_private
from deploy.local import HAPROXY_PORTS
from tests.fakes.certificates import Authority
from tests.fakes.processes.fork_server import wait_for_end
from tests.fakes.processes.supervised import PROFILE
from tests.fakes.processes.under_ray import HOST, Addresses, Machine, one_machine, running

CALL_SECONDS = 300.0  # on a machine that is busy: the commands import for longer than they ask


def calls_of(said: str) -> list[str]:
    """The three calls, and `bough doctor`, in the order in which they are printed."""
    _, *calls = re.split(r"\n\n", said[said.index("ready;") :])
    return [call.partition(" shows nodes")[0] for call in calls]


def pasted(call: str, folder: Path, key: str = "") -> subprocess.CompletedProcess[str]:
    """Result of a call in a user's shell with this key, or none."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BOUGH_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= {"BOUGH_API_KEY": key} if key else {}
    command = ("bash", "-o", "pipefail", "-c", call.replace("curl ", "curl --fail-with-body -sS ", 1))
    return subprocess.run(command, capture_output=True, text=True, timeout=CALL_SECONDS, cwd=folder, env=environment)


@pytest.mark.cluster
async def test_the_printed_command_works_only_with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are named as an operator would, by paths from where `make serve` runs, in variables for all processes."""
    Authority().files(tmp_path, "tls")
    key = new_key()
    write_private("--keys", str(tmp_path / "keys.jsonl"), f'{{"name": "alice", "sha256": "{hash_of(key)}"}}\n')
    write_private("--worker-key-file", str(tmp_path / "worker.key"), "w" * 64)
    for name, file in (
        ("BOUGH_ORCHESTRATOR_KEYS", "keys.jsonl"), ("BOUGH_WORKER_KEY_FILE", "worker.key"),
        ("BOUGH_TLS_CERT", "tls.pem"), ("BOUGH_TLS_KEY", "tls.key"), ("BOUGH_TLS_CA", "ca.pem"),
    ):  # fmt: skip
        monkeypatch.setenv(name, file)
    async with running(one_machine(), PROFILE, tmp_path) as said:
        *calls, doctor = calls_of(said)
        assert len(calls) == 3
        for call in calls:
            done = await asyncio.to_thread(pasted, call, tmp_path, key)
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.strip()
            refused = await asyncio.to_thread(pasted, call, tmp_path)
            assert refused.returncode != 0, call
        seen = await asyncio.to_thread(pasted, doctor, tmp_path, key)
        assert "all is well" in seen.stdout, seen.stdout + seen.stderr
        assert "rediss://127.0.0.1" in seen.stdout, "the index speaks TLS as well"
        plain = calls[0].replace("https://", "http://")
        assert (await asyncio.to_thread(pasted, plain, tmp_path, key)).returncode != 0


@pytest.mark.cluster
@pytest.mark.parametrize("with_haproxy", [False, True], ids=["serve", "haproxy"])
async def test_the_printed_command_works_when_pasted(
    with_haproxy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine as it comes, under a Ray that the test starts and ends; and with HAProxy for HTTP."""
    machine = one_machine()
    if with_haproxy:
        monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
        for name in HAPROXY_PORTS:
            monkeypatch.setenv(name, str(free_port(HOST)))
    async with running(machine, PROFILE, tmp_path) as said:
        *calls, doctor = calls_of(said)
        done = await asyncio.gather(*(asyncio.to_thread(pasted, call, tmp_path) for call in (*calls, doctor)))
        assert len(done) == 4
        for one in done:
            assert one.returncode == 0, one.stdout + one.stderr
        assert '"finish_reason"' in done[0].stdout
        assert "all is well" in done[-1].stdout, done[-1].stdout
        await hung_up(machine.addresses)
        await ended(machine)


async def hung_up(addresses: Addresses) -> None:
    """A client that leaves in the middle of its answer ends its request at the orchestrator."""
    body = {"prompt": "Why", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    async with Client(addresses.grpc) as client, httpx.AsyncClient(trust_env=False) as http:
        async with asyncio.timeout(CALL_SECONDS):
            async with http.stream("POST", f"{addresses.proxy}/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()  # kept, as one that is collected would hang up
                assert "error" not in await anext(lines)
                assert (await client.loads()).num_requests_running == 1
            while (await client.loads()).num_requests_running:
                await asyncio.sleep(0.1)


async def ended(machine: Machine) -> None:
    """An orchestrator's program that is killed is started again where it was; who comes once it has ended waits."""
    deployments = machine.config["applications"][0]["deployments"]
    (port,) = (each["user_config"]["port"] for each in deployments if each["name"] == "Index")
    registry = Registry(f"redis://{HOST}:{port}")
    (record,) = [each for each in await registry.workers() if each.kind == "orchestrator"]
    process_id = int(record.worker_id.split("-")[1])
    end = os.pidfd_open(process_id)
    os.kill(process_id, signal.SIGKILL)
    # Until it has ended it may accept a request that it cannot answer, which is not sent again for a client.
    await asyncio.to_thread(wait_for_end, end, CALL_SECONDS)
    body = {"prompt": "Why", "max_tokens": 4}
    async with httpx.AsyncClient(trust_env=False, timeout=CALL_SECONDS) as http:
        asking = [http.post(f"{machine.addresses.proxy}/v1/completions", json=body) for _ in range(8)]
        answers = await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]
    await registry.close()
