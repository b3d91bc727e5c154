"""Several replicas of each kind of process, which can be added, stopped and replaced under load."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.client import Client
from bough.config.processes import DraftConfig, OrchestratorConfig, ServiceConfig, TargetConfig, parse, to_flags
from bough.processes.child import Child
from bough.processes.exit_with_parent import MODULE
from bough.processes.launch import Cluster
from bough.registry.records import WorkerRecord
from bough.registry.registry import Registry
from bough.security.certificates import CertificateFiles
from loadtest.common.stacks import settings_of

CONFIGS: dict[str, type[ServiceConfig]] = {
    "target": TargetConfig,
    "draft": DraftConfig,
    "orchestrator": OrchestratorConfig,
}
MODULES = {"target": "target_worker", "draft": "draft_worker", "orchestrator": "orchestrator"}
START_SECONDS = 60.0
DRAIN_SECONDS = 60.0
POLL_SECONDS = 0.05
ACCEPTANCE = {"kind": "by_rank", "vector": "llama-3-70b-8b-cnn-dailymail", "spread": 0.5}


class Stack:
    """The running replicas by kind, in order of their start."""

    def __init__(self, cluster: Cluster, registry: Registry, flags: dict[str, Sequence[str]]) -> None:
        self.replicas: dict[str, list[tuple[Child, WorkerRecord]]] = {kind: [] for kind in CONFIGS}
        self._cluster, self._registry, self._flags = cluster, registry, flags
        self._numbers = itertools.count()

    @property
    def index_url(self) -> str:
        """URL of the index."""
        return self._cluster.index_url

    def addresses(self, kind: str) -> list[str]:
        """Addresses of a kind's replicas."""
        return [record.address for _, record in self.replicas[kind]]

    @property
    def folder(self) -> Path:
        """The temporary folder of the processes' logs."""
        return self._cluster.folder

    async def http_url(self, key: str = "", certificates: CertificateFiles | None = None) -> str:
        """URL, without /v1, of the first orchestrator's HTTP API, once it knows its workers."""
        async with Client(self.addresses("orchestrator")[0], api_key=key, certificates=certificates) as client:
            while True:
                info = await client.server_info()
                if {worker.info.kind for worker in info.workers if not worker.problem} == {"target", "draft"}:
                    return info.http_url
                await asyncio.sleep(POLL_SECONDS)

    async def add(self, kind: str) -> WorkerRecord:
        """Start a replica; returns when it has registered. Raises RuntimeError if it does not."""
        known = {record.worker_id for record in await self._registry.workers()}
        flags = [*self._flags[kind], "--index-url", self._cluster.index_url]
        config = parse(CONFIGS[kind], MODULES[kind], flags, os.environ)
        command = [sys.executable, *MODULE, MODULES[kind], *to_flags(config)]
        child = self._cluster.start(f"{kind}-{next(self._numbers)}", command)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and not child.has_ended():
            for record in await self._registry.workers():
                if record.kind == kind and record.worker_id not in known:
                    self.replicas[kind].append((child, record))
                    return record
            await asyncio.sleep(POLL_SECONDS)
        raise RuntimeError(f"{child.name} did not start:\n{child.tail()}")

    async def retire(self, kind: str) -> int:
        """Stop the oldest replica with SIGTERM and wait until it has drained; returns its exit status."""
        child, _ = self.replicas[kind].pop(0)
        child.process.terminate()
        deadline = time.monotonic() + DRAIN_SECONDS
        while not child.has_ended():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{child.name} did not end within {DRAIN_SECONDS:g} s of SIGTERM:\n{child.tail()}")
            await asyncio.sleep(POLL_SECONDS)
        return child.process.wait()

    def process_ids(self) -> dict[str, int]:
        """Process ids of all processes, the index included."""
        return {child.name: child.process.pid for child in self._cluster.children.values() if not child.has_ended()}


def write_profile(
    folder: Path,
    sweep_seconds: float,
    knee_rows: int = 4096,
    kv_tokens: int = 2_000_000,
    max_context: int = 8192,
    max_nodes: int = 512,
) -> Path:
    """Write a profile: a sweep of up to `knee_rows` rows takes `sweep_seconds`, a draft step a hundredth of that."""
    profile: dict[str, Any] = {
        "source": f"Made up: sweeps of {sweep_seconds:g} s whatever they compute, to measure the time before them.",
        "target": {
            "link_seconds": sweep_seconds,
            "compute_row_seconds": sweep_seconds / knee_rows,
            "max_sweep_rows": knee_rows,
            "kv_tokens": kv_tokens,
            "max_context": max_context,
            "max_nodes": max_nodes,
        },
        "draft": {"base_seconds": sweep_seconds / 100, "row_seconds": sweep_seconds / 100_000},
        "acceptance": ACCEPTANCE,
    }
    path = folder / f"sweep-{sweep_seconds:g}.json"
    path.write_text(json.dumps(profile))
    return path


@asynccontextmanager
async def stack(
    profile: Path | str,
    orchestrator_flags: Sequence[str] = (),
    replicas: int = 1,
    everywhere_flags: Sequence[str] = (),
    worker_flags: Sequence[str] = (),
) -> AsyncIterator[Stack]:
    """Run simulated workers of a profile with their own index and the given numbers of replicas."""
    flags: dict[str, Sequence[str]] = {
        "target": ["--simulate", str(profile), *everywhere_flags, *worker_flags],
        "draft": ["--simulate", str(profile), *everywhere_flags, *worker_flags],
        "orchestrator": ["--port", "0", "--http-port", "0", *orchestrator_flags, *everywhere_flags],
    }
    settings = settings_of(**flags)
    with TemporaryDirectory(prefix="bough-served-") as folder:
        cluster = Cluster(settings, Path(folder))
        try:
            cluster.start_index()
            registry = Registry(cluster.index_url)
            await registry.wait()
            running = Stack(cluster, registry, flags)
            for kind in ("target", "draft", "orchestrator"):
                for _ in range(replicas):
                    await running.add(kind)
            try:
                yield running
            finally:
                await registry.close()
        finally:
            await asyncio.to_thread(cluster.stop_all)
