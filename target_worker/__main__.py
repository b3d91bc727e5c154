"""`python -m target_worker`: runs one target worker until SIGTERM."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from bough.config.processes import TargetConfig, parse
from bough.pb import target_pb2, target_pb2_grpc
from bough.processes.process import new_worker_id, run, serve_worker
from bough.processes.startup import stage
from bough.rpc.server import service_name
from bough.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from target_worker.served import ServedTarget
    from target_worker.service import TargetService

    Parts = tuple[TargetService, Callable[[], ServedTarget]]  # the servicer, and a function that loads the worker


async def main() -> None:
    """Read the settings and serve."""
    config = parse(TargetConfig, "target_worker", sys.argv[1:], os.environ)
    configure_logging(config)
    stage("importing libraries")
    worker_id = new_worker_id("target")
    servicer, load = simulated_parts(config, worker_id) if config.simulate else model_parts(config, worker_id)
    await serve_worker(
        config,
        "target",
        worker_id,
        service_name(target_pb2.DESCRIPTOR, "Target"),
        servicer,
        target_pb2_grpc.add_TargetServicer_to_server,
        load,
    )


def model_parts(config: TargetConfig, worker_id: str) -> Parts:
    """The parts of a worker with a model; imports torch."""
    from bough.model.architecture.light_imports import import_transformers

    import_transformers()
    from target_worker.service import TargetService
    from target_worker.worker import TargetWorker

    return TargetService(), lambda: TargetWorker(config, worker_id)


def simulated_parts(config: TargetConfig, worker_id: str) -> Parts:
    """The parts of a simulated worker, which has no weights; imports no torch.

    Raises:
        ConfigError: the profile is unknown or has an invalid field.
    """
    from bough.simulation.clock import SimulatedClock
    from bough.simulation.line import Line
    from bough.simulation.pair import simulated_pair
    from target_worker.service import TargetService
    from target_worker.simulated import SimulatedTarget

    pair = simulated_pair(config.simulate)
    clock = SimulatedClock(pair.profile.clock_scale)
    line = Line("target", pair.profile, clock)
    return TargetService(line.crossed), lambda: SimulatedTarget(config, worker_id, pair, clock)


if __name__ == "__main__":
    run(main)
