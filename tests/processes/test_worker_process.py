"""A worker's process from its start to its end, in this one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from bough.config.processes import TargetConfig, parse
from bough.processes.worker_process import run_worker
from bough.rpc.services import TARGET
from bough.simulation.clock import SimulatedClock
from target_worker.service import TargetService
from target_worker.simulated import SimulatedTarget
from tests.fakes.simulated import pair_of
from tests.fakes.waiting import until


async def test_the_event_loop_continues_while_a_worker_is_closed(index_url: str, tmp_path: Path) -> None:
    """It stood still until the sweep under way had ended, and a second signal ended nothing meanwhile."""
    pair, stop, servicer = pair_of(tmp_path), asyncio.Event(), TargetService()
    is_closing, may_close = threading.Event(), threading.Event()

    class SlowToClose(SimulatedTarget):
        def close(self) -> None:
            super().close()
            is_closing.set()
            assert may_close.wait(10), "the event loop stands still"

    flags = ["--simulate", "given", "--port", "0", "--metrics-port", "-1", "--namespace", "closing"]
    config = parse(TargetConfig, "t", [*flags, "--index-url", index_url], {})

    def load() -> SimulatedTarget:
        return SlowToClose(config, "target", pair, SimulatedClock(pair.profile.clock_scale))

    serving = asyncio.create_task(run_worker(config, "target", "target", TARGET, servicer, load, stop))
    await until(lambda: servicer.loaded is not None)
    stop.set()
    await until(is_closing.is_set)
    assert not serving.done()
    may_close.set()
    await serving
