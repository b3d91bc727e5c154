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
    require_one_way(config)
    if config.stage_of:
        configure_logging(config)
        await serve_stage(config)
        return
    await serve_worker(TargetConfig, TARGET, model_parts, simulated_parts)


def require_one_way(config: TargetConfig) -> None:
    """Raises ConfigError for flags that exclude each other: for a head, for a stage, and for no model at all."""
    several = config.stages > 1
    if config.simulate and (config.stage_of or several):
        flag = "--stage-of" if config.stage_of else "--stages"
        raise ConfigError(f"--simulate: must be left out with {flag}, got {config.simulate}")
    if config.stage_of and several:
        raise ConfigError(f"--stages: must be left out with --stage-of, got {config.stages}")


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
    """Serve layers of another target; imports torch."""
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
