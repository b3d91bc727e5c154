"""All three services in this process, with real gRPC, a real index and the smallest model, for tests of many calls.

They are assembled from settings, servicers and workers like in each process's `__main__`. Services in processes of
their own are tested in `tests/loadtest/chaos/test_chaos.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bough.concurrency.futures import settle
from bough.config.processes import DraftConfig, OrchestratorConfig, TargetConfig, parse
from bough.processes.launch import Cluster, Settings
from bough.registry.records import WorkerRecord
from bough.registry.registry import Registry, registered
from bough.rpc.drain import SessionGate
from bough.rpc.server import serving
from bough.rpc.services import DRAFT, TARGET, add_service
from bough.simulation.clock import SimulatedClock
from bough.simulation.pair import SimulatedPair
from draft_worker.service import DraftService
from draft_worker.simulated import SimulatedDraftWorker
from orchestrator.assembly import assembled
from orchestrator.serving.requests import Requests
from target_worker.service import TargetService
from target_worker.simulated import SimulatedTarget
from tests.fakes.torch_imports import import_torch
from tests.fakes.waiting import until

if TYPE_CHECKING:  # these load torch, which tests of simulated workers need not
    from draft_worker.worker import DraftWorker
    from target_worker.worker import TargetWorker

MAX_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Stack:
    """The running workers and orchestrator, and their addresses."""

    target: TargetWorker | SimulatedTarget
    draft: DraftWorker | SimulatedDraftWorker
    requests: Requests
    registry: Registry
    index_url: str
    addresses: dict[str, str]  # "target", "draft", "orchestrator"

    def check_integrity(self) -> None:
        """Check the target's slot pool on the engine's thread, between two calls; raises AssertionError."""
        engine, future = self.target._engine, Future[None]()

        def check() -> None:
            engine.pool.check_integrity()
            settle(future, None)

        engine._inbox.post(future, check)
        future.result(timeout=60)


@asynccontextmanager
async def stack(
    folder: Path, *target_flags: str, model: Path | None = None, draft_model: Path | None = None
) -> AsyncIterator[Stack]:
    """Run all services for the duration of the block. The draft's model is the target's by default."""
    import_torch()
    from draft_worker.worker import DraftWorker
    from loadtest.common.tiny_model import SMALLEST, save_model
    from target_worker.worker import TargetWorker

    model = model or save_model(folder / "smallest", SMALLEST)
    flags = ["--dtype", "float32", "--threads", "1", "--max-nodes", "32", "--max-context", str(MAX_CONTEXT)]
    of_target = ["--model", str(model), "--resident-layers", "0", "--metrics-port", "-1", *target_flags]
    target_config = parse(TargetConfig, "t", [*flags, *of_target], {})
    draft_config = parse(DraftConfig, "d", [*flags, "--model", str(draft_model or model)], {})
    async with _around(
        lambda: TargetWorker(target_config, "target"), lambda: DraftWorker(draft_config, "draft"), folder, target_config
    ) as running:
        yield running


@asynccontextmanager
async def simulated_stack(folder: Path, pair: SimulatedPair) -> AsyncIterator[Stack]:
    """Run an orchestrator with simulated workers of this pair for the duration of the block."""
    clock, simulate = SimulatedClock(pair.profile.clock_scale), ["--simulate", "given", "--metrics-port", "-1"]
    target_config, draft_config = parse(TargetConfig, "t", simulate, {}), parse(DraftConfig, "d", simulate[:2], {})
    async with _around(
        lambda: SimulatedTarget(target_config, "target", pair, clock),
        lambda: SimulatedDraftWorker(draft_config, "draft", pair, clock),
        folder,
        target_config,
    ) as running:
        yield running


@asynccontextmanager
async def _around(
    make_target: Callable[[], TargetWorker | SimulatedTarget],
    make_draft: Callable[[], DraftWorker | SimulatedDraftWorker],
    folder: Path,
    target_config: TargetConfig,
) -> AsyncIterator[Stack]:
    """Run an index, an orchestrator and the services of both workers."""
    cluster = Cluster(Settings(target_config, None, parse(OrchestratorConfig, "o", [], {})), folder)
    async with AsyncExitStack() as exits:
        exits.callback(cluster.stop_all)
        cluster.start_index()
        registry = Registry(cluster.index_url)
        exits.push_async_callback(registry.close)
        await registry.wait()
        target, draft = make_target(), make_draft()
        exits.callback(target.close)
        exits.callback(draft.close)
        target_service, draft_service = TargetService(), DraftService()
        target_service.loaded, draft_service.loaded = target, draft
        addresses = {}
        for kind, service, servicer in (("target", TARGET, target_service), ("draft", DRAFT, draft_service)):
            add, gate = partial(add_service, service, servicer), SessionGate("Verify", "Grow")
            served = await exits.enter_async_context(serving("127.0.0.1", 0, service.full_name, add, gate))
            addresses[kind] = f"127.0.0.1:{served.port}"
            record = WorkerRecord(kind, kind, addresses[kind])
            await exits.enter_async_context(registered(registry, lambda record=record: record))
        flags = ["--index-url", cluster.index_url, "--port", "0", "--http-port", "-1", "--metrics-port", "0"]
        config = parse(OrchestratorConfig, "o", [*flags, "--budget", "8", "--draft-timeout", "5"], {})
        orchestrator = await exits.enter_async_context(assembled(config, asyncio.Event()))
        addresses["orchestrator"] = f"127.0.0.1:{orchestrator.port}"
        await until(lambda: len(orchestrator.directory.statuses()) >= 2)
        yield Stack(target, draft, orchestrator.requests, orchestrator.registry, cluster.index_url, addresses)
