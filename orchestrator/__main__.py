"""`python -m orchestrator`: one orchestrator, until SIGTERM and what runs then has finished."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from bough.config import OrchestratorConfig, parse
from bough.process import configure_logging, run, stop_event
from orchestrator.assembly import Stopped, assembled


async def main() -> None:
    """Reads the settings and serves: SERVING while there is a target to ask; drains when told to stop."""
    config = parse(OrchestratorConfig, "orchestrator", sys.argv[1:], os.environ)
    configure_logging(config.log_level)
    stop = stop_event()
    with suppress(Stopped):
        async with assembled(config, stop) as orchestrator:
            await orchestrator.serve(stop)


if __name__ == "__main__":
    run(main)
