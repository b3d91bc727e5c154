"""`python -m target_worker`: runs one target worker until SIGTERM."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from bough.config.processes import TargetConfig, parse
from bough.errors import ConfigError
from bough.processes.compile_once import require_kernel_folder
from bough.processes.process import run, stage
from bough.processes.worker_process import serve_worker
from bough.rpc.services import TARGET
from bough.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from bough.processes.worker_process import Parts
    from target_worker.service import ServedTarget


async def main() -> None:
    """Read the settings and serve."""
    config = parse(TargetConfig, "target_worker", sys.argv[1:], os.environ)
    if config.stage_of:
        configure_logging(config)
        await serve_stage(config)
        return
    await serve_worker(TargetConfig, TARGET, model_parts, simulated_parts)


def model_parts(config: TargetConfig, worker_id: str) -> Parts[ServedTarget]:
    """The parts of a worker with a model; imports torch."""
    from bough.model.architecture.light_imports import import_transformers

    import_transformers()
    require_kernel_folder()
    from target_worker.service import HeadService, TargetService
    from target_worker.worker import TargetWorker

    if config.stages == 1:
        return TargetService(), lambda: TargetWorker(config, worker_id)
    from target_worker.stages.head import StagesHead

    stages = StagesHead(config)
    return HeadService(stages), lambda: TargetWorker(config, worker_id, stages)


async def serve_stage(config: TargetConfig) -> None:
    """Serve layers of another target; imports torch. Raises ConfigError if the settings contradict each other."""
    for name, value in (("--simulate", config.simulate), ("--stages", config.stages > 1)):
        if value:
            raise ConfigError(f"{name}: must be left out with --stage-of, got {value}")
    from bough.model.architecture.light_imports import import_transformers

    stage("importing libraries")
    import_transformers()
    require_kernel_folder()
    from target_worker.stages.stage_worker import serve_stage as serve

    await serve(config)


def simulated_parts(config: TargetConfig, worker_id: str) -> Parts[ServedTarget]:
    """The parts of a simulated worker; imports no torch. Raises ConfigError for an invalid profile."""
    from bough.simulation.clock import Line, SimulatedClock
    from bough.simulation.pair import simulated_pair
    from target_worker.service import TargetService
    from target_worker.simulated import SimulatedTarget

    pair = simulated_pair(config.simulate)
    clock = SimulatedClock(pair.profile.clock_scale)
    line = Line("target", pair.profile, clock)
    return TargetService(line.crossed), lambda: SimulatedTarget(config, worker_id, pair, clock)


if __name__ == "__main__":
    run(main)
