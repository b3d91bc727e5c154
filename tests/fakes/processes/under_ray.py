"""Runs `make serve` on free ports."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bough.config.addresses import free_port
from bough.errors import ConfigError, Unavailable
from bough.processes import exit_with_parent
from deploy.check import load

ROOT = Path(__file__).parents[3]
HOST = "127.0.0.1"
READY = "three ways to ask"  # printed by deploy.up once it can serve requests
START_SECONDS = 900.0  # includes making the demonstration models
STOP_SECONDS = 120.0  # limit for draining all replicas
POLL_SECONDS = 0.2


class Addresses(NamedTuple):
    """Addresses of one orchestrator: gRPC, and Serve's proxy."""

    grpc: str
    proxy: str


class Machine(NamedTuple):
    """A configuration for one machine, its addresses, and the port of Ray's dashboard."""

    config: dict[str, Any]
    addresses: Addresses
    dashboard_port: int


@asynccontextmanager
async def running(machine: Machine, profile: Path, folder: Path) -> AsyncIterator[str]:
    """Run `make serve` with a configuration in a folder; yields its output once it serves."""
    with TemporaryDirectory(prefix="bough-served-") as scratch:
        file, log = Path(scratch) / "serve.yaml", Path(scratch) / "serve.log"
        file.write_text(json.dumps(machine.config))  # JSON is valid YAML
        command = [sys.executable, "-m", "deploy.up", str(file), "--dashboard-port", str(machine.dashboard_port)]
        process = _start([*command, "--simulate", str(profile)], log, folder)
        try:
            yield await _until_ready(process, log)
        finally:
            await asyncio.to_thread(_stop, process)


def one_machine() -> Machine:
    """The shipped configuration with free ports."""
    config = load(ROOT / "deploy" / "one-machine.yaml")
    grpc_port, proxy_port, index_port, dashboard_port = (free_port(HOST) for _ in range(4))
    config["http_options"]["port"] = proxy_port
    settings = {each["name"]: each["user_config"] for each in config["applications"][0]["deployments"]}
    settings["Index"]["port"] = index_port
    settings["Orchestrator"]["program"]["port"] = grpc_port
    return Machine(config, Addresses(f"{HOST}:{grpc_port}", f"http://{HOST}:{proxy_port}"), dashboard_port)


def _start(command: list[str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    with log.open("ab") as stream:
        return exit_with_parent.start(
            command,
            lambda line: subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, cwd=folder, env=environment
            ),
        )


async def _until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while READY not in (said := log.read_text(errors="replace")):
        if process.poll() is not None:
            raise ConfigError(f"the Ray node ended with status {process.returncode}:\n{said[-2000:]}")
        if time.monotonic() > deadline:
            raise Unavailable(f"no request could be served within {START_SECONDS:g} s:\n{said[-2000:]}")
        await asyncio.sleep(POLL_SECONDS)
    return said


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, which drains replicas and then ends the Ray node."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
