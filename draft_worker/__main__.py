"""`python -m draft_worker`: runs one draft worker until SIGTERM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config.processes import DraftConfig
from bough.processes.compile_once import require_kernel_folder
from bough.processes.process import run
from bough.processes.worker_process import serve_worker
from bough.rpc.services import DRAFT

if TYPE_CHECKING:
    from bough.processes.worker_process import Parts
    from draft_worker.service import ServedDraft


async def main() -> None:
    """Read the settings and serve."""
    await serve_worker(DraftConfig, DRAFT, model_parts, simulated_parts)


def model_parts(config: DraftConfig, worker_id: str) -> Parts[ServedDraft]:
    """The parts of a worker with a model; imports torch."""
    from bough.model.architecture.light_imports import import_transformers

    import_transformers()
    require_kernel_folder()
    from draft_worker.service import DraftService
    from draft_worker.worker import DraftWorker

    return DraftService(), lambda: DraftWorker(config, worker_id)


def simulated_parts(config: DraftConfig, worker_id: str) -> Parts[ServedDraft]:
    """The parts of a simulated worker; imports no torch and no numba. Raises ConfigError for an invalid profile."""
    from bough.simulation.clock import Line, SimulatedClock
    from bough.simulation.pair import simulated_pair
    from draft_worker.service import DraftService
    from draft_worker.simulated import SimulatedDraftWorker

    pair = simulated_pair(config.simulate)
    clock = SimulatedClock(pair.profile.clock_scale)
    line = Line("draft", pair.profile, clock)
    return DraftService(line.crossed), lambda: SimulatedDraftWorker(config, worker_id, pair, clock)


if __name__ == "__main__":
    run(main)
