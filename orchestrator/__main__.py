"""`python -m orchestrator`: runs one orchestrator until SIGTERM, after which running requests finish."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from bough.config.processes import OrchestratorConfig, parse
from bough.processes.process import StoppedAtStart, run, stop_event
from bough.telemetry.logs import configure_logging
from orchestrator.assembly import assembled


async def main() -> None:
    """Read the settings and serve. Health is SERVING while a target can be used; SIGTERM drains."""
    config = parse(OrchestratorConfig, "orchestrator", sys.argv[1:], os.environ)
    configure_logging(config)
    stop = stop_event()
    if config.keys:
        _on_hangup(lambda: None)  # SIGHUP must not end the process before there are keys to read again
    with suppress(StoppedAtStart):
        async with assembled(config, stop) as orchestrator:
            gc.collect()
            gc.freeze()  # exclude existing objects from collection: a full pass over them would stall all streams
            if config.keys:
                _on_hangup(orchestrator.callers.refresh)
            await orchestrator.serve(stop)


def _on_hangup(act: Callable[[], None]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, act)


if __name__ == "__main__":
    run(main)
