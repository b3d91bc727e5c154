"""`python -m target_worker`: runs one target worker until SIGTERM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config.processes import TargetConfig
from bough.processes.compile_once import require_kernel_folder
from bough.processes.process import run
from bough.processes.worker_process import serve_worker
from bough.rpc.services import TARGET

if TYPE_CHECKING:
    from bough.processes.worker_process import Parts
    from target_worker.service import ServedTarget


async def main() -> None:
    """Read the settings and serve."""
    await serve_worker(TargetConfig, TARGET, model_parts, simulated_parts)


def model_parts(config: TargetConfig, worker_id: str) -> Parts[ServedTarget]:
    """The parts of a worker with a model; imports torch."""
    from bough.model.architecture.light_imports import import_transformers

    import_transformers()
    require_kernel_folder()
    from target_worker.service import TargetService
    from target_worker.worker import TargetWorker

    return TargetService(), lambda: TargetWorker(config, worker_id)


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
