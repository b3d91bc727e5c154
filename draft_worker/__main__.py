"""`python -m draft_worker`: runs one draft worker until SIGTERM."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from bough.config.processes import DraftConfig, parse
from bough.model.cpu import jit
from bough.pb import draft_pb2, draft_pb2_grpc
from bough.processes.process import new_worker_id, run, serve_worker
from bough.processes.startup import stage
from bough.rpc.server import service_name
from bough.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from draft_worker.served import ServedDraft
    from draft_worker.service import DraftService

    Parts = tuple[DraftService, Callable[[], ServedDraft]]  # the servicer, and a function that loads the worker


async def main() -> None:
    """Read the settings and serve."""
    config = parse(DraftConfig, "draft_worker", sys.argv[1:], os.environ)
    configure_logging(config)
    stage("importing libraries")
    worker_id = new_worker_id("draft")
    servicer, load = simulated_parts(config, worker_id) if config.simulate else model_parts(config, worker_id)
    await serve_worker(
        config,
        "draft",
        worker_id,
        service_name(draft_pb2.DESCRIPTOR, "Draft"),
        servicer,
        draft_pb2_grpc.add_DraftServicer_to_server,
        load,
    )


def model_parts(config: DraftConfig, worker_id: str) -> Parts:
    """The parts of a worker with a model; imports torch."""
    from bough.model.architecture.light_imports import import_transformers

    import_transformers()
    from draft_worker.service import DraftService
    from draft_worker.worker import DraftWorker

    return DraftService(), lambda: DraftWorker(config, worker_id)


def simulated_parts(config: DraftConfig, worker_id: str) -> Parts:
    """The parts of a simulated worker, which has no weights; imports no torch and no numba.

    Raises:
        ConfigError: the profile is unknown or has an invalid field.
    """
    jit.interpret()
    from bough.simulation.clock import SimulatedClock
    from bough.simulation.line import Line
    from bough.simulation.pair import simulated_pair
    from draft_worker.service import DraftService
    from draft_worker.simulated import SimulatedDraftWorker

    pair = simulated_pair(config.simulate)
    clock = SimulatedClock(pair.profile.clock_scale)
    line = Line("draft", pair.profile, clock)
    return DraftService(line.crossed), lambda: SimulatedDraftWorker(config, worker_id, pair, clock)


if __name__ == "__main__":
    run(main)
